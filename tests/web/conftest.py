"""Debian's chromium, and a dashboard for it to look at. Without a browser these tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from web.browser import CHROMIUM, DESK, Dashboard, Watched


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:  # one worker has the one browser
        item.add_marker(pytest.mark.xdist_group("web"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser. One per module: while it lives, its event loop is this thread's."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: make test-web installs it"
    )
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"there is no {CHROMIUM}: make test-web installs Debian's chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # chromium refuses root otherwise
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Watched]]:
    """`open_page(home, viewport=..., color_scheme=...)`; nothing may have gone wrong on a page when its test ends."""
    opened: list[tuple[Any, Watched]] = []

    def make(home: str, **context: Any) -> Watched:
        made = chromium.new_context(**{"viewport": DESK, "reduced_motion": "reduce", **context})
        made.set_default_timeout(10_000)
        opened.append((made, Watched(made, home)))
        return opened[-1][1]

    yield make
    for _, watched in opened:
        watched.check()
    for made, _ in opened:
        made.close()


@pytest.fixture(scope="module")
def content() -> Callable[[Dashboard], None]:
    """What lies in the folders before the dashboard starts. Modules override it."""
    return lambda dashboard: None


@pytest.fixture(scope="module")
def dashboard(
    chromium: Any, content: Callable[[Dashboard], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dashboard]:
    made = Dashboard(tmp_path_factory.mktemp("web"))
    content(made)
    process = made.start()
    yield made
    process.terminate()
    process.communicate(timeout=20)
