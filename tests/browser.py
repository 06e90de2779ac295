"""Debian's Chromium as a reader uses it, and what went wrong in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")


class Reader:
    """A page, what its console said that it should not, and what it asked of other hosts."""

    def __init__(self, context: Any, home: str) -> None:
        self.page = context.new_page()
        self.home = home
        self.complaints: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._asked)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.home + "/", "data:", "blob:")):
            self.complaints.append(f"asked {request.url}")


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser; skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("needs Debian's chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        yield browser
        browser.close()
