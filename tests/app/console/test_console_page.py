"""The console in a real browser, on a real server: chat, streams, a long prompt, the switch."""

from __future__ import annotations

from pathlib import Path
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


def test_a_visitor_chats_streams_and_switches(server: Server, browser: Any, tmp_path: Path) -> None:
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    assert text(browser, "model") == "demo"

    browser.find_element("id", "input").send_keys("What is chunked prefill?\n")
    wait(browser, lambda d: d.find_elements("css selector", ".message.assistant small"))
    answer = browser.find_element("css selector", ".message.assistant span").text
    assert len(answer.split()) > 5

    browser.find_element("id", "streams").click()
    wait(browser, lambda d: len(d.find_elements("css selector", ".lane")) == 9)  # and the server's
    wait(browser, lambda d: "ms" in text(d, "worst"))
    wait(browser, lambda d: text(d, "rate").removesuffix(" tokens/s").isdigit())
    browser.find_element("id", "long").click()
    wait(browser, lambda d: "P50" in text(d, "tbt-note"))

    browser.find_element("css selector", "#policy option[value=vllm]").click()
    wait(browser, lambda d: d.execute_async_script(
        "const done = arguments[0]; fetch('console/status').then(r => r.json())"
        ".then(s => done(s.policy))") == "vllm")  # fmt: skip

    wait(browser, lambda d: d.find_elements("css selector", ".cause"))
    assert text(browser, "kept-note").endswith("% kept")
    budget = browser.find_element("id", "budget")
    budget.send_keys("99999999\n")
    wait(browser, lambda d: "budget" in text(d, "notice"))

    for name, width, dark in (("wide", 1400, False), ("narrow-dark", 480, True)):
        browser.set_window_size(width, 1000)
        browser.execute_script(
            "document.documentElement.classList.toggle('dark', arguments[0])", dark
        )
        assert browser.save_screenshot(str(tmp_path / f"{name}.png"))
        overflow = browser.execute_script(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert overflow <= 0, f"{name}: the page scrolls sideways"
    severe = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert not severe


def test_lanes_keep_their_shape_and_an_empty_field_is_the_server_s_default(
    server: Server, browser: Any
) -> None:
    size = {"width": 420, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)  # a window is wider
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    browser.execute_script("document.getElementById('max-tokens').value = ''")
    browser.find_element("id", "input").send_keys("What is chunked prefill?\n")
    wait(browser, lambda d: d.find_elements("css selector", ".message.assistant small"))
    assert not browser.find_elements("css selector", ".message.error")

    browser.find_element("id", "streams").click()
    wait(browser, lambda d: len(d.find_elements("css selector", ".lane")) == 9)
    heights, clipped, widest = browser.execute_script(
        """const rows = [...document.querySelectorAll(".lane")], heights = new Set();
        for (const words of ["1 ms ago", "9999 ms ago"])
          for (const row of rows) {
            row.lastChild.textContent = words;
            heights.add(row.offsetHeight);
          }
        const spans = rows.flatMap((row) => [...row.querySelectorAll("span")]);
        return [[...heights], spans.filter((s) => s.scrollWidth > s.clientWidth + 1).length,
          Math.max(...spans.map((s) => s.getBoundingClientRect().right))];"""
    )
    assert len(heights) == 1
    assert clipped == 0
    assert widest <= 420


def test_a_stream_that_rests_is_not_stalled_and_each_step_has_its_budget(
    server: Server, browser: Any
) -> None:
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    resting, going, has_budget = browser.execute_async_script(
        """const done = arguments[0], $ = (id) => document.getElementById(id);
        Promise.all([import("/console/streams.js"), import("/console/charts.js")])
          .then(([{ Streams }, { bars, color }]) => {
            const streams = new Streams({ $ }), lane = streams.lane("one");
            Object.assign(streams, { abort: {}, lanes: [lane] });
            $("lanes").replaceChildren(lane.row);
            streams.rest(lane, "done");
            streams.draw(null);
            const resting = lane.gap.textContent;
            streams.resume(lane, performance.now());
            lane.times.push(performance.now());
            streams.draw(null);
            const canvas = document.createElement("canvas");
            canvas.setAttribute("height", "100");
            document.body.append(canvas);
            bars(canvas, [[1, 0]],
              { colors: ["--decode", "--prefill"], slots: 1, limits: [10], lineColor: "--budget" });
            const [r, g, b] = color("--budget").match(/\\d+/g).map(Number);
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, 100);
            let found = false;
            for (let i = 0; i < data.length; i += 4)
              found ||= data[i] === r && data[i + 1] === g && data[i + 2] === b;
            done([resting, lane.gap.textContent, found]);
          }, (problem) => done([String(problem), "", false]));"""
    )
    assert resting == "done"
    assert going.endswith("ms ago")
    assert has_budget


def test_the_rate_is_that_of_streamed_tokens_and_a_step_s_time_its_slowest_stage_s(
    server: Server, browser: Any
) -> None:
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    shown = browser.execute_async_script(
        """const done = arguments[0];
        import("/console/charts.js").then(({ count, rate, stepMs }) => {
          const counts = [];
          for (let n = 0; n <= 20; n += 1) count(counts, n / 10, 4 * n);
          const shown = [rate([], 0), rate(counts, 0), rate(counts, 2), rate(counts, 5)];
          count(counts, 60, 180); // of 100 tokens after a minute without any
          shown.push(rate(counts, 0), counts.length);
          count(counts, 61, 0); // by a server that began anew
          const twoStages = { stages_s: [[1.0, 1.25], [2.0, 2.5]] };
          done([...shown, rate(counts, 0), stepMs(twoStages), stepMs({ stages_s: [] })]);
        }, (problem) => done([String(problem)]));"""
    )
    assert shown[:6] == ["", "40 tokens/s", "20 tokens/s", "0 tokens/s", "20 tokens/s", 2]
    assert shown[6:] == ["", 500, 0]


def test_engines_that_take_a_part_of_each_request_say_which(server: Server, browser: Any) -> None:
    browser.get(server.url + "/")
    browser.set_window_size(1000, 1000)
    shown, is_clipped = browser.execute_async_script(
        """const done = arguments[0];
        import("/console/fleet.js").then(({ showFleet }) => {
          const place = document.getElementById("fleet");
          showFleet(place, {
            engines: ["prefill", "decode", "both", undefined].map((role, i) =>
              ({ id: `engine-${i}`, state: "serving", role, least_slack_s: 0.123 })),
            fleet: { latest_moves: [], num_engines_lost: 0, num_moves: 0 },
          });
          const pills = [...place.querySelectorAll(".pill")].map((pill) => pill.textContent);
          const cells = [...place.querySelectorAll(".engine span")];
          done([pills, cells.some((cell) => cell.scrollWidth > cell.clientWidth + 1)]);
        }, (problem) => done([[String(problem)], true]));"""
    )
    assert shown == ["serving, prefill", "serving, decode", "serving", "serving"]
    assert not is_clipped


def test_nothing_is_cut_off_or_wider_than_the_page(server: Server, browser: Any) -> None:
    browser.get(server.url + "/")
    wait(browser, lambda d: text(d, "state") == "ready")
    for width in (320, 390, 1000, 1400):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert _cut_off(browser) == [0, []], width


def _cut_off(browser: Any) -> Any:
    """By how many pixels the page scrolls sideways, and the texts with too little room."""
    return browser.execute_async_script(
        """const done = arguments[0], $ = (id) => document.getElementById(id);
        import("/console/fleet.js").then(({ showFleet }) => {
          const engine = { role: "prefill", num_running: 128, num_waiting: 2345,
            least_slack_s: -1.234, num_blocks: 10, num_free_blocks: 0, step_budget: 2048 };
          showFleet($("fleet"), {
            engines: ["serving", "draining"].map((state) =>
              ({ ...engine, id: `an-engine-with-a-name-of-some-length-${state}`, state })),
            fleet: { latest_moves: [], num_engines_lost: 1, num_moves: 2 },
          });
          $("held").hidden = false;
          $("model").textContent = "organisation/A-model-with-a-name-of-some-length-70B-it-fp8";
          const cells = document.querySelectorAll(".tile, .engine span:not([title]), #held");
          const root = document.documentElement;
          done([root.scrollWidth - root.clientWidth, [...cells]
            .filter((cell) => cell.scrollWidth > cell.clientWidth + 1)
            .map((cell) => cell.textContent)]);
        }, (problem) => done([String(problem), []]));"""
    )


def test_one_budget_far_above_the_others_does_not_flatten_the_steps(
    server: Server, browser: Any
) -> None:
    browser.get(server.url + "/")
    rows = browser.execute_async_script(
        """const done = arguments[0];
        import("/console/charts.js").then(({ bars, color }) => {
          const canvas = document.createElement("canvas");
          canvas.setAttribute("height", "100");
          document.body.append(canvas);
          const budgets = Array.from({ length: 40 }, (_, n) => (n === 7 ? 8192 : 16));
          bars(canvas, budgets.map(() => [8, 0]),
            { colors: ["--decode", "--prefill"], slots: 40, limits: budgets, lineColor: "--slo" });
          const x = Math.round(canvas.width / 2), [r, g, b] = color("--decode").match(/\\d+/g);
          const { data } = canvas.getContext("2d").getImageData(x, 0, 3, canvas.height);
          let rows = 0;
          for (let i = 0; i < data.length; i += 12)
            rows += [0, 4, 8].some((at) => data[i + at] == r && data[i + at + 1] == g);
          done(rows / canvas.height);
        }, (problem) => done(String(problem)));"""
    )
    assert rows > 0.3


def test_a_chart_asks_for_a_color_once(server: Server, browser: Any) -> None:
    """Each time is a style of the page: once a bar, idle pages would keep a core busy."""
    browser.get(server.url + "/")
    num_styles = browser.execute_async_script(
        """const done = arguments[0], own = window.getComputedStyle;
        import("/console/charts.js").then(({ bars, histogram }) => {
          const canvas = document.createElement("canvas");
          canvas.setAttribute("height", "100");
          document.body.append(canvas);
          let styles = 0;
          window.getComputedStyle = (...of) => { styles += 1; return own(...of); };
          const values = Array.from({ length: 240 }, (_, n) => 1.04 ** n);
          bars(canvas, values.map((v) => [v, v]), { colors: ["--decode", "--prefill"],
            slots: 240, limits: values, lineColor: "--budget" });
          histogram(canvas, values, { line: 9, lineColor: "--slo", color: "--decode" });
          window.getComputedStyle = own;
          done(styles);
        }, (problem) => done(String(problem)));"""
    )
    assert num_styles <= 8


def test_long_prompts_that_were_long_ago_are_not_drawn(server: Server, browser: Any) -> None:
    browser.get(server.url + "/")
    marks = browser.execute_async_script(
        """const done = arguments[0], $ = (id) => document.getElementById(id);
        import("/console/streams.js").then(({ Streams }) => {
          const streams = new Streams({ $ }), now = performance.now();
          const ends = [now - 60_000, now - 1000, null];
          for (const end of ends) streams.marks.push({ begin: now - 90_000, end });
          streams.draw(null);
          done(streams.marks.map(({ end }) => ends.indexOf(end)));
        }, (problem) => done(String(problem)));"""
    )
    assert marks == [1, 2]


def test_charts_do_not_join_what_was_before_and_after_a_tab_was_out_of_view(
    server: Server, browser: Any
) -> None:
    step = (
        '{"done_s": 1, "num_decode_tokens": 0, "num_prefill_tokens": 50, "token_budget": null,'
        ' "predicted_s": null, "stages_s": [[0, 1]]}'
    )
    source = f"""{{
        const own = window.fetch;
        let told = 'data: {{"iterations": [{step}], "gaps_s": [], "num_tokens": 0}}\\n\\n';
        window.isHidden = false;
        Object.defineProperty(document, "hidden", {{ get: () => window.isHidden }});
        window.fetch = async (path, options) => {{
          if (!path.startsWith("console/feed")) return own(path, options);
          return new Response(new ReadableStream({{
            start(to) {{
              to.enqueue(new TextEncoder().encode(told));
              told = "";
              options.signal.addEventListener("abort", () => to.error(options.signal.reason));
            }},
          }}));
        }};
    }}"""
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    browser.get(server.url + "/")
    wait(browser, _has_prefill)
    for hidden in ("true", "false"):
        browser.execute_script(
            f"window.isHidden = {hidden}; document.dispatchEvent(new Event('visibilitychange'))"
        )
    wait(browser, lambda d: not _has_prefill(d))


def _has_prefill(browser: Any) -> bool:
    """Whether the chart of tokens shows any of prompts."""
    return bool(
        browser.execute_async_script(
            """const done = arguments[0], canvas = document.getElementById("tokens");
            import("/console/charts.js").then(({ color }) => {
              const [r, g, b] = color("--prefill").match(/\\d+/g).map(Number);
              const { data } = canvas.getContext("2d").getImageData(
                0, 0, canvas.width, canvas.height);
              let found = false;
              for (let i = 0; i < data.length; i += 4)
                found ||= data[i] === r && data[i + 1] === g && data[i + 2] === b;
              done(found);
            });"""
        )
    )
