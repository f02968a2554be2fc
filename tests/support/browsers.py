"""The system's Chromium, driven by playwright, for tests of HTML pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

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
def chromium() -> Iterator[Browser]:
    """Start a browser, and close it at the end of the block."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()
