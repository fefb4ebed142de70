"""Headless Chromium, for the console's test and for its picture."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-sync", "--no-first-run", "--disable-component-update", "--disable-quic",
)  # fmt: skip


def is_installed() -> bool:
    """Whether the packages chromium and chromium-driver are."""
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


@contextmanager
def chromium(width: int, height: int) -> Iterator[Any]:
    """A driver of a page of that size in pixels, its console log kept."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_window_size(width, height)
        yield driver
    finally:
        driver.quit()


def wait(driver: Any, check: Callable[[Any], object], poll_s: float = 0.1) -> Any:
    """What `check(driver)` returns once it is true; raises TimeoutException after 30 s."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    # An element of a page that is just being loaded anew is looked for again.
    stale = (StaleElementReferenceException,)
    return WebDriverWait(driver, 30, poll_frequency=poll_s, ignored_exceptions=stale).until(check)


def text(driver: Any, name: str) -> str:
    """The text of the element with that id."""
    return str(driver.find_element("id", name).text)
