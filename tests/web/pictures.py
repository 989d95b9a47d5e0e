"""The pictures of docs/dashboard.md: the showcase of the shipped records, photographed.

python tests/web/pictures.py
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
WIDTH = 1280


def main() -> None:
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    from playwright.sync_api import sync_playwright

    from web.browser import CHROMIUM
    from xsake.dashboard.serve.command import default_records, gather
    from xsake.dashboard.show import showcase

    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        showcase.build(gather([], records=default_records(), own_tuning=False), Path(folder) / "site")
        home = (Path(folder) / "site" / "index.html").as_uri()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def take(
            name: str, route: str, wait_for: str, height: int, scheme: str, at: tuple[float, float] | None
        ) -> None:
            page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
            page.goto(home + route)
            page.wait_for_selector(wait_for)
            if at is not None:
                box = page.locator(".map canvas").bounding_box()
                page.mouse.move(box["x"] + at[0] * box["width"], box["y"] + at[1] * box["height"])
            page.wait_for_timeout(500)
            save(IMAGES / f"{name}.png", page.screenshot())
            page.close()

        take("runs", "#/runs?smooth=0.8", "[data-chart=loss] .u-over", 860, "dark", None)
        take("explorer", "#/explorer?layer=8&head=3&budget=0.3", ".small-map canvas", 930, "light", (0.42, 0.86))
        take("benchmarks", "#/benchmarks/gpu_attention", ".chart svg", 900, "light", None)
        take("replay", "#/replay?layer=1&head=1&step=240", ".small-map canvas", 1240, "dark", None)
        browser.close()


def save(path: Path, png: bytes) -> None:
    """A PNG of 256 colours: a third of the size, and the same to the eye."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
