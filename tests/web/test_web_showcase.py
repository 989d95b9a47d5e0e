"""The showcase from file:// with the network blocked: every page works, and what needs a server is hidden."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from web import recorded
from web.browser import DESK, PHONE, ROOT, Watched
from web.pixels import kept_pixels
from xsake.dashboard.read import stored
from xsake.dashboard.serve.command import gather
from xsake.dashboard.show import showcase

SIDE = 64
ROUTES = {
    "runs": ("#/runs?smooth=0.6", "[data-chart=loss] .u-over"),
    "explorer": ("#/explorer", ".small-map canvas"),
    "benchmarks": ("#/benchmarks/gpu_attention", ".chart svg"),
    "replay": ("#/replay", ".small-map canvas"),
    "tuning": ("#/tuning", "[data-database]"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The showcase of the shipped runs and of small recordings; the address of its page."""
    folder = tmp_path_factory.mktemp("showcase")
    records = folder / "records"
    stored.write(records / "explorer" / "small.json.xz", recorded.recording("small", SIDE))
    stored.write(records / "replays" / "test.json.xz", recorded.replay("test"))
    results = ROOT / "benchmarks" / "results"
    (records / "gpu_attention.json").write_bytes((results / "gpu_attention.json").read_bytes())
    shutil.copytree(results / "train_gpu", records / "train_gpu")
    showcase.build(gather([], records=records), folder / "site")
    return (folder / "site" / "index.html").as_uri()


@pytest.mark.parametrize("viewport", [DESK, PHONE])
def test_every_page_works_without_a_server(open_page: Callable[..., Watched], site: str, viewport: Any) -> None:
    watched = open_page(site, viewport=viewport, offline=True)
    for name, (route, wait_for) in ROUTES.items():
        page = watched.open(route, wait_for)
        assert page.locator("nav [aria-current=page]").get_attribute("href") == f"#/{name}"
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], f"{name} is too wide"
        assert page.locator(".notice.bad").count() == 0
        assert page.locator("textarea").count() == 0, "a text cannot be computed without a server"
    assert all(url.startswith("file://") for url in watched.requests), watched.requests


def test_masks_and_settings_are_those_of_the_dashboard(open_page: Callable[..., Watched], site: str) -> None:
    watched = open_page(site, offline=True)
    page = watched.open("#/explorer?show=kept&head=1&layer=1&budget=0.5", ".map canvas[data-shown=kept]")
    expected = np.asarray(recorded.block_mask("hads", 0.5, SIDE, 1).to_blocks())[0, 0]
    assert np.array_equal(kept_pixels(page, ".map canvas", SIDE), expected)
    page.locator("input[type=range]").first.press("ArrowLeft")
    page.wait_for_selector("canvas[aria-label*=' at 20%']")
    page.reload()
    page.wait_for_selector("canvas[aria-label*=' at 20%']")
    expected = np.asarray(recorded.block_mask("hads", 0.2, SIDE, 1).to_blocks())[0, 0]
    assert np.array_equal(kept_pixels(page, ".map canvas", SIDE), expected)


def test_the_showcase_is_small(site: str) -> None:
    folder = Path(site.removeprefix("file://")).parent
    assert sum(path.stat().st_size for path in (folder / "assets").iterdir()) < 300_000
