"""The console of a server with API keys, in a real browser: it asks for one and works with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.console.chromium import is_installed, text, wait
from tests.serve.server_process import ROOT, Server, running

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,  # a server of its own
    pytest.mark.skipif(
        not is_installed(), reason="needs the packages chromium and chromium-driver"
    ),
]
ADMIN, PLAIN = "secret-ädmin", "secret-plain"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = {
        "model": {"path": str(ROOT / "configs/models/demo")},
        "kv": {"memory_gib": 0.3},
        "engine": {"calibrate": False},
        "api": {"api_keys": {PLAIN: {}, ADMIN: {"admin": True}}},
    }
    with running(tmp_path_factory.mktemp("keyed"), args) as started:
        yield started


def policy(server: Server) -> str:
    headers = {"authorization": f"Bearer {PLAIN}"}
    return str(httpx.get(f"{server.url}/console/status", headers=headers).json()["policy"])


def give(browser: Any, key: str) -> None:
    wait(browser, lambda d: d.find_element("id", "key").is_displayed())
    browser.find_element("id", "key-input").send_keys(key + "\n")


def choose(browser: Any, name: str) -> None:
    browser.find_element("css selector", f"#policy option[value={name}]").click()


def test_a_visitor_gives_a_key_and_may_do_what_it_may(server: Server, browser: Any) -> None:
    browser.get(server.url + "/")
    give(browser, "wrong")
    wait(browser, lambda d: "does not know" in text(d, "key-problem"))
    assert text(browser, "state") == "needs a key"
    kept = "return [JSON.stringify({...sessionStorage}), localStorage.length, document.cookie]"
    assert browser.execute_script(kept) == ["{}", 0, ""]
    assert not browser.find_element("id", "forget").is_displayed()

    browser.find_element("id", "key-input").clear()
    give(browser, PLAIN)
    wait(browser, lambda d: text(d, "state") == "ready")
    assert not browser.find_element("id", "key").is_displayed()
    browser.find_element("id", "input").send_keys("Hello\n")  # by the key, and seen in the feed
    wait(browser, lambda d: d.find_elements("css selector", ".message.assistant small"))
    assert not browser.find_elements("css selector", ".message.error")
    wait(browser, lambda d: "P50" in text(d, "tbt-note"))
    before = policy(server)
    choose(browser, "vllm")
    wait(browser, lambda d: "admin: true" in text(d, "notice"))
    shown = browser.find_element("id", "policy").get_property("value")
    assert shown == before == policy(server)

    browser.refresh()
    wait(browser, lambda d: text(d, "state") == "ready")  # the tab has kept it
    browser.find_element("id", "forget").click()
    wait(browser, lambda d: d.find_element("id", "key").is_displayed())
    assert browser.execute_script("return sessionStorage.length") == 0
    browser.execute_script("sessionStorage.setItem('legato-api-key', 'of an earlier server')")
    browser.refresh()
    wait(browser, lambda d: "no longer" in text(d, "key-problem"))
    give(browser, ADMIN)
    wait(browser, lambda d: text(d, "state") == "ready")
    choose(browser, "vllm")
    wait(browser, lambda _: policy(server) == "vllm")
    assert text(browser, "notice") == ""
