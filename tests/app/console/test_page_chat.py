"""The chat of the console's page with answers of every shape, in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.app.console.chromium import is_installed, text, wait
from tests.serve.server_process import Server

pytestmark = [
    pytest.mark.long,
    pytest.mark.browser,
    pytest.mark.skipif(
        not is_installed(), reason="needs the packages chromium and chromium-driver"
    ),
]

# `answer(parts)` sends them as events at once, keeps the connection open until `end()` or
# `fail()`, and returns when the page is done with it; `until` waits for what it is given.
ANSWERS = """const done = arguments[0], $ = (id) => document.getElementById(id), own = window.fetch;
  let body, stream;
  window.fetch = async (path, options) => {
    if (path !== "v1/chat/completions") return own(path, options);
    if (!body) throw new TypeError("Failed to fetch");
    return new Response(body);
  };
  const until = async (holds) => {
    while (!holds()) await new Promise((resolve) => setTimeout(resolve, 5));
  };
  const add = (parts) => {
    const event = (choice) => `data: ${JSON.stringify({ choices: [choice] })}\\n\\n`;
    stream.enqueue(new TextEncoder().encode(parts.map(event).join("")));
  };
  const piece = (content) => ({ delta: { content } });
  const ask = (parts) => {
    body = parts && new ReadableStream({ start(to) { stream = to; add(parts); } });
    $("input").value = "Why?";
    $("composer").requestSubmit();
  };
  const ended = async (end) => { end(); await until(() => !$("send").disabled); };
  const last = (what) => $("messages").lastChild.querySelector(what);
  """


def run(browser: Any, server: Server, script: str) -> Any:
    """What `script`, the body of an async function, returns on the page."""
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    ending = "})().then(done, (problem) => done(String(problem)));"
    return browser.execute_async_script(f"{ANSWERS}(async () => {{{script}{ending}")


def test_a_long_answer_is_drawn_once_a_frame_and_who_reads_above_is_left_there(
    server: Server, browser: Any
) -> None:
    drawn, end, above, whole = run(
        browser,
        server,
        """const messages = $("messages"), lines = (n) => new Array(n).fill(piece("line\\n"));
        let drawn = 0;
        const fromEnd = () => messages.scrollHeight - messages.scrollTop - messages.clientHeight;
        ask(lines(1));
        await until(() => last("span").textContent);
        new MutationObserver((changes) => {
          drawn += changes.filter(({ addedNodes }) => addedNodes.length).length;
        }).observe(last("span"), { childList: true });
        add(lines(2000));
        await until(() => last("span").textContent.length === 5 * 2001);
        const seen = [drawn, fromEnd()];
        messages.scrollTop = 7;
        add(lines(10));
        await until(() => last("span").textContent.length === 5 * 2011);
        const above = messages.scrollTop;
        await ended(() => stream.close());
        return [...seen, above, messages.scrollTop === above];""",
    )
    assert 0 < drawn < 200
    assert end < 2
    assert above == 7
    assert whole


def test_what_ended_an_answer_is_told_beside_it(server: Server, browser: Any) -> None:
    told = run(
        browser,
        server,
        """const told = [], tell = () => told.push([last("span").textContent,
          last("small").textContent, $("messages").lastChild.classList.contains("error")]);
        const timing = { ttft_ms: 5, max_tbt_ms: 2, objective_kept: null };
        ask([piece("Cut"), { delta: {}, finish_reason: "length" }]);
        const event = { choices: [], timing, usage: { completion_tokens: 1 } };
        stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(event)}\\n\\n`));
        await ended(() => stream.close());
        tell();
        ask([piece("Half of")]);
        await ended(() => stream.close());
        tell();
        ask([piece("Half of")]);
        await until(() => last("span").textContent);
        await ended(() => stream.error(new TypeError("network error")));
        tell();
        await ended(() => ask(null));
        tell();
        return told;""",
    )
    assert told == [
        ["Cut", "1 token, first after 5 ms, longest gap 2 ms, cut at the token limit", False],
        ["Half of", "The answer broke off.", True],
        ["Half of", "The answer broke off: network error", True],
        ["", "The server does not answer: Failed to fetch", True],
    ]


def test_the_focus_stays_where_the_visitor_has_put_it(server: Server, browser: Any) -> None:
    focused = run(
        browser,
        server,
        """const focused = [];
        for (const name of ["budget", "temperature", ""]) {
          ask([piece("Yes"), { delta: {}, finish_reason: "stop" }]);
          if (name) $(name).focus();
          else document.activeElement.blur(); // as of a button that is disabled
          await ended(() => stream.close());
          focused.push(document.activeElement.id);
        }
        return focused;""",
    )
    assert focused == ["budget", "temperature", "input"]


def test_each_paragraph_has_the_direction_of_its_script(server: Server, browser: Any) -> None:
    """By where its first letter stands: at the right of the bubble, or at its left."""
    is_right = run(
        browser,
        server,
        """ask([piece(`Yes.\\n\\u05e9\\u05dc\\u05d5\\u05dd.\\n${"wide ".repeat(9)}`)]);
        await until(() => last("span").textContent);
        const text = last("span").firstChild, box = last("span").getBoundingClientRect();
        return [0, 5].map((at) => {
          const letter = document.createRange();
          letter.setStart(text, at);
          letter.setEnd(text, at + 1);
          const { left, right } = letter.getBoundingClientRect();
          return left - box.left > box.right - right;
        });""",
    )
    assert is_right == [False, True]
