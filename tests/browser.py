"""A real Chromium, for tests of what people see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, expect, sync_playwright

from tests.bounds import HANG_SECONDS

# The program's name in the packages of Debian, Ubuntu and Google; `.ci/run` installs the first.
_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium without a window."""
    path = next((path for name in _NAMES if (path := shutil.which(name))), "/usr/bin/chromium")
    expect.set_options(timeout=1000 * HANG_SECONDS)
    with sync_playwright() as playwright:
        # Chromium has no sandbox for root in a container.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=options)
        try:
            yield browser
        finally:
            browser.close()
