"""The console's picture: eight streams of the demo model while a 3000-token prompt is read.

    python -m tests.app.console.take_screenshot [FILE]     app/console/screenshot.png by default

Needs the packages chromium and chromium-driver. Server and browser share the machine's cores with
everything else, so the prompt is sent several times and the least disturbed picture is kept.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tests.app.console.chromium import chromium, is_installed, text, wait
from tests.serve.server_process import ROOT, running

PICTURE = ROOT / "app/console/screenshot.png"
WIDTH, HEIGHT = 1400, 1240
TOKEN_BUDGET = 128  # half the demo's: the browser takes its share of two cores
STREAMS_S = 9.0  # of streams alone before each long prompt: a lane shows 8 s
# The page draws the last 240 iterations; the chunks are in the middle of them this long after.
AFTER_PROMPT_S = 0.4
TRIES = 6
PREFILLING = "return document.querySelectorAll('#tiles .tile b')[1].textContent"


def begin(browser: Any, url: str) -> None:
    """Do what a visitor does first: a question, then eight streams."""
    browser.get(f"{url}/")
    wait(browser, lambda d: text(d, "state") == "ready")
    browser.find_element("id", "input").send_keys("What is chunked prefill?\n")
    wait(browser, lambda d: d.find_elements("css selector", ".message.assistant small"))
    browser.find_element("id", "streams").click()
    wait(browser, lambda d: len(d.find_elements("css selector", ".lane")) == 9)


def capture(browser: Any) -> tuple[int, bytes]:
    """Send the long prompt; (longest gap in ms, the page as PNG in the moment after it is read)."""
    time.sleep(STREAMS_S)
    browser.find_element("id", "long").click()
    for number in ("1", "0"):  # requests whose prompt is being read
        wait(browser, lambda d, n=number: d.execute_script(PREFILLING) == n, poll_s=0.02)
    time.sleep(AFTER_PROMPT_S)
    picture = bytes(browser.get_screenshot_as_png())
    return int("".join(filter(str.isdigit, text(browser, "worst")))), picture


def main(arguments: list[str]) -> int:
    if not is_installed():
        sys.stderr.write("needs the packages chromium and chromium-driver: no picture taken\n")
        return 1
    target = Path(arguments[0]) if arguments else PICTURE
    config = yaml.safe_load((ROOT / "configs/serve/demo.yaml").read_text("utf-8"))
    args = config["applications"][0]["args"]
    args["model"]["path"] = str(ROOT / args["model"]["path"])
    args["scheduling"]["token_budget"] = TOKEN_BUDGET
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), args) as server,
        chromium(WIDTH, HEIGHT) as browser,
    ):
        begin(browser, server.url)
        longest_ms, picture = min(capture(browser) for _ in range(TRIES))
    target.write_bytes(picture)
    sys.stdout.write(f"{target}: longest gap {longest_ms} ms, {len(picture) // 1000} kB\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
