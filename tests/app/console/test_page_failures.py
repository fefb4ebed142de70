"""What the console's page does with answers that a server rarely gives, in a real browser."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.app.console.chromium import is_installed, text, wait
from tests.serve.server_process import Server

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not is_installed(), reason="needs the packages chromium and chromium-driver"
    ),
]


def test_a_feed_that_breaks_off_is_opened_again_and_one_that_is_refused_is_not(
    server: Server, browser: Any
) -> None:
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    seen = browser.execute_async_script(
        """const done = arguments[0], own = window.fetch, took = [], sent = [];
        const body = (parts, end) => new ReadableStream({
          async start(to) {
            for (const part of parts) to.enqueue(new TextEncoder().encode(part));
            if (end) to.close();
          },
          pull(to) { to.error(new TypeError("the network went away")); },
        }, { highWaterMark: 0 });
        const answers = [
          new Response(body(['data: {"n"', ': 1}\\n', '\\ndata: {"n": 2}\\n\\ndata: {'], true)),
          new Response(body(['data: {"n": 3}\\n\\n'], false)),
          null,
          new Response("", { status: 503 }),
          new Response("", { status: 429 }),
          new Response("", { status: 403 }),
        ];
        window.fetch = async (path, options) => {
          if (path !== "feed") return own(path, options);
          sent.push("authorization" in options.headers);
          const answer = answers.shift();
          if (!answer) throw new TypeError("nobody listens");
          return answer;
        };
        import("/console/sse.js")
          .then(({ follow }) => follow("feed", ({ n }) => took.push(n), 1))
          .then(() => done([took, sent, answers.length]), (problem) => done(String(problem)));"""
    )
    assert seen == [[1, 2, 3], [False] * 6, 0]  # without keys none is sent


def test_a_tab_out_of_view_has_no_feed(server: Server, browser: Any) -> None:
    """A browser gives all tabs of a server six connections: the seventh tab would wait forever."""
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    seen = browser.execute_async_script(
        """const done = arguments[0], own = window.fetch, seen = [];
        let isHidden = true, answer = () => new Response("", { status: 403 });
        Object.defineProperty(document, "hidden", { get: () => isHidden });
        const turn = (hidden) => {
          isHidden = hidden;
          document.dispatchEvent(new Event("visibilitychange"));
        };
        const opened = () => new Promise((resolve) => {
          window.fetch = async (path, options) => {
            if (path !== "feed") return own(path, options);
            resolve(options.signal);
            return new Response(new ReadableStream({
              start(to) {
                options.signal.addEventListener("abort", () => to.error(options.signal.reason));
              },
            }));
          };
        });
        import("/console/sse.js").then(async ({ follow }) => {
          let isOpen = false;
          const first = opened();
          first.then(() => { isOpen = true; });
          follow("feed", () => {}, 1e6);
          await new Promise((resolve) => setTimeout(resolve));
          seen.push(isOpen);
          turn(false);
          const signal = await first;
          seen.push(signal.aborted);
          const second = opened();
          turn(true);
          await new Promise((resolve) => setTimeout(resolve));
          seen.push(signal.aborted);
          turn(false);
          seen.push((await second).aborted);
          done(seen);
        }).catch((problem) => done(String(problem)));"""
    )
    assert seen == [False, False, True, False]


def test_an_hour_out_of_view_leaves_no_more_than_is_shown(server: Server, browser: Any) -> None:
    browser.get(server.url + "/")
    num_kept = browser.execute_async_script(
        """const done = arguments[0], $ = (id) => document.getElementById(id);
        import("/console/streams.js").then(({ Streams }) => {
          const streams = new Streams({ $ });
          streams.abort = {};
          for (let done_s = 0; done_s < 3600; done_s += 0.1) {
            performance.now = () => 1000 * done_s;
            streams.served([{ done_s, num_decode_tokens: 1 }], []);
          }
          done(streams.server.times.length);
        }, (problem) => done(String(problem)));"""
    )
    assert num_kept <= 82  # of eight seconds


def test_why_a_server_gives_no_figures_is_on_the_page(server: Server, browser: Any) -> None:
    fast = "const own = setTimeout; window.setTimeout = (call, ms) => own(call, ms / 20);"
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": f"{{{fast}}}"})
    browser.get(server.url + "/?model=nosuch")
    wait(browser, lambda d: "of a model 'nosuch'" in text(d, "trouble"))
    assert text(browser, "state") == "refused"
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    assert text(browser, "trouble") == ""
    for answer, told in (
        ('Response.json({ ready: false, reason: "it loads" }, { status: 503 })', "it loads"),
        ("Promise.reject(new TypeError())", "has not answered since"),
    ):
        browser.execute_script(
            "window.own ??= window.fetch; window.fetch = async (path, options) =>"
            f"path.startsWith('console/status') ? {answer} : own(path, options)"
        )
        wait(browser, partial(_is_told, told))
    browser.execute_script("window.fetch = own")
    wait(browser, lambda d: text(d, "state") == "ready" and text(d, "trouble") == "")


def _is_told(words: str, browser: Any) -> bool:
    return words in text(browser, "trouble")


def test_what_ends_early_leaves_nothing_behind(server: Server, browser: Any) -> None:
    """An answer that New chat cuts is not in the next conversation; failed streams are off."""
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    sent, failed = browser.execute_async_script(
        """const done = arguments[0], $ = (id) => document.getElementById(id), sent = [];
        const own = window.fetch;
        const piece = 'data: {"choices": [{"delta": {"content": "old"}}]}\\n\\n';
        window.fetch = async (path, options) => {
          if (path === "v1/completions") return new Response("", { status: 503 });
          if (path !== "v1/chat/completions") return own(path, options);
          sent.push(JSON.parse(options.body).messages.map(({ content }) => content));
          return new Response(new ReadableStream({
            start(to) {
              to.enqueue(new TextEncoder().encode(piece));
              options.signal.addEventListener("abort", () => to.error(options.signal.reason));
            },
          }));
        };
        const until = async (holds) => {
          while (!holds()) await new Promise((resolve) => setTimeout(resolve, 5));
        };
        const ask = async (words) => {
          $("input").value = words;
          $("composer").requestSubmit();
          await until(() => $("messages").textContent.includes("old"));
          $("clear").click();
          await until(() => !$("send").disabled);
        };
        const run = async () => {
          await ask("first");
          await ask("second");
          const before = $("streams").textContent;
          $("streams").click();
          await until(() => $("notice").textContent);
          return [sent, before === $("streams").textContent];
        };
        run().then(done, (problem) => done([String(problem), false]));"""
    )
    assert sent == [["first"], ["second"]]
    assert failed


def test_the_newest_change_has_the_notice_and_what_failed_is_told(
    server: Server, browser: Any
) -> None:
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    late, failed, switched, state = browser.execute_async_script(
        """const done = arguments[0], $ = (id) => document.getElementById(id);
        const own = window.fetch, before = $("policy").value, late = [], failed = [];
        let settle, isBroken = false, faults = 0;
        window.fetch = async (path, options) => {
          if (path.startsWith("console/settings"))
            return new Promise((answer, fail) => { settle = { answer, fail }; });
          return isBroken ? new Response('{"ready": true}') : own(path, options);
        };
        const until = async (holds) => {
          while (!holds()) await new Promise((resolve) => setTimeout(resolve, 5));
        };
        const change = (id, value) => {
          $(id).value = value;
          $(id).dispatchEvent(new Event("change"));
        };
        const other = [...$("policy").options].find(({ value }) => value !== before).value;
        const run = async () => {
          for (const end of [() => settle.answer(new Response("{}")),
            () => settle.fail(new TypeError("gone"))]) {
            change("policy", other);
            change("budget", "99999999"); // which is told at once
            end();
            await new Promise((resolve) => setTimeout(resolve)); // all that an answer leads to
            late.push($("notice").textContent);
          }
          for (const end of [() => settle.fail(new TypeError("gone")),
            () => settle.answer(new Response("<h1>Bad gateway</h1>", { status: 502 }))]) {
            change("policy", other);
            end();
            await until(() => $("notice").textContent);
            failed.push($("notice").textContent);
          }
          const switched = $("policy").value !== before;
          console.error = () => { faults += 1; };
          isBroken = true; // a status that the page cannot show
          await until(() => faults);
          return [late, failed, switched, $("state").textContent];
        };
        run().then(done, (problem) => done([[String(problem)], [], true, ""]));"""
    )
    assert [notice[:7] for notice in late] == ["budget:"] * 2
    assert failed == ["The server does not answer: gone", "HTTP 502"]
    assert not switched
    assert state == "ready"


def test_reasoning_is_shown_beside_the_answer_and_a_cut_one_keeps_its_question(
    server: Server, browser: Any
) -> None:
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    sent, shown = browser.execute_async_script(
        """const done = arguments[0], $ = (id) => document.getElementById(id), sent = [];
        const own = window.fetch, reasoning = { reasoning_content: "Well, " };
        const answers = [[reasoning, { reasoning_content: "no" }], [reasoning, { content: "Yes" }]];
        window.fetch = async (path, options) => {
          if (path !== "v1/chat/completions") return own(path, options);
          sent.push(JSON.parse(options.body).messages.map(({ content }) => content));
          const deltas = answers.shift();
          const event = (delta) => `data: ${JSON.stringify({ choices: [{ delta }] })}\\n\\n`;
          return new Response(deltas.map(event).join(""));
        };
        const run = async () => {
          for (const words of ["first", "second"]) {
            $("input").value = words;
            $("composer").requestSubmit();
            while ($("send").disabled) await new Promise((resolve) => setTimeout(resolve, 5));
          }
          const parts = (name) => [...$("messages").querySelectorAll(`.message.assistant ${name}`)];
          const shown = [".thought", "span"].map((name) => parts(name).map((e) => e.textContent));
          return [sent, shown];
        };
        run().then(done, (problem) => done([String(problem), []]));"""
    )
    assert sent == [["first"], ["first", "", "second"]]
    assert shown == [["Well, no", "Well, "], ["", "Yes"]]
