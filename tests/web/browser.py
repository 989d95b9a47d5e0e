"""A page that is watched for problems, and a dashboard as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.get("XSAKE_CHROMIUM", "/usr/bin/chromium")
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}


def environment() -> dict[str, str]:
    """For commands that a test starts: they run the code of this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


class Watched:
    """A page, and all that went wrong on it: console messages, exceptions, dialogs, requests to other hosts."""

    def __init__(self, context: Any, home: str):
        self.page = context.new_page()
        self.home = home
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning") and "willReadFrequently" not in message.text:  # these tests read pixels
            self.problems.append(f"{message.type}: {message.text} {message.location.get('url')}")

    def open(self, route: str, wait_for: str) -> Any:
        self.page.goto(self.home + route)
        self.page.wait_for_selector(wait_for)
        return self.page

    def document(self, name: str) -> Any:
        """A document of the server, for comparison."""
        return self.page.request.get(f"{self.home}{name}").json()

    def check(self) -> None:
        here = urlsplit(self.home)
        away = [url for url in self.requests if urlsplit(url)[:2] != here[:2] and not url.startswith("data:")]
        assert not self.problems, self.problems
        assert not away, away


class Dashboard:
    """`xsake dashboard` on a folder of runs and a folder of records."""

    def __init__(self, folder: Path):
        self.runs, self.records = folder / "runs", folder / "records"
        self.runs.mkdir(parents=True)
        self.records.mkdir()
        self.address = ""

    def start(self, port: str = "0") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "xsake", "dashboard", str(self.runs), "--port", port]
        command += ["--records", str(self.records)]
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        self.address = process.stdout.readline().strip()
        assert self.address.startswith("http://127.0.0.1:"), self.address
        return process
