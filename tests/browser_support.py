"""A headless Chromium for the tests of web pages, which are skipped where there is none."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--window-size=1200,1600"),
)


@contextmanager
def browser(profile: Path) -> Iterator[Chrome]:
    """A browser without a history.

    Args:
        profile: an empty folder for what it writes.
    """
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("drives a browser with selenium, which is not installed")
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if chromium is None or driver is None:
        pytest.skip("needs Debian's chromium and chromium-driver")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options=options, service=ChromeService(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


def complaints(chrome: Chrome) -> list[Any]:
    """What the console of the page was told since it was last asked."""
    return [entry["message"] for entry in chrome.get_log("browser")]  # type: ignore[no-untyped-call]


def requests(chrome: Chrome, page: str) -> list[str]:
    """The addresses that a page asked for since this was last called, its own first."""
    entries = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]  # type: ignore[no-untyped-call]
    asked = [entry["params"] for entry in entries if entry["method"] == "Network.requestWillBeSent"]
    # Not what the browser's own first page, of which there are traces too, asks it for.
    return [each["request"]["url"] for each in asked if each["documentURL"] == page]
