"""The system's Chromium, driven by playwright, for tests of HTML pages."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

HOSTILE = '<script>window.pwned=1</script><img src=x onerror="window.pwned=2">\'"</style>'

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
needs_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: chromium, chromium-browser or google-chrome"
)


@contextmanager
def chromium(*options: str) -> Iterator[Browser]:
    """Start a browser, and close it at the end of the block."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", *options]
        )
        yield found
        found.close()


class Watched:
    """A page, with a record of everything it should not do."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.on("request", self._on_request)

    def _on_request(self, request) -> None:
        if not request.url.startswith(("file://", "data:")):
            self.complaints.append(f"request: {request.url}")

    def ask(self, script: str):
        return self.page.evaluate(script)


def luminance(colour: str) -> float:
    """Return the relative luminance of a color written as rgb(...)."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
