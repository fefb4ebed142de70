"""`legato batch` against the API over the hand-computable engine."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from actors.scheduling.interfaces import Quote
from actors.scheduling.request import Objective
from app.api.batches.lines import Line
from app.api.batches.runner import LAST
from app.api.http.options import ApiOptions, KeyLimits
from app.cli.batch import _run, answer_all, keep_answers, read_lines
from app.cli.main import app
from app.engine_client.client import RequestRefused
from tests.app.api.conftest import MODEL, Server, StartServer, start_server, text

__all__ = ["start_server", "text"]  # fixtures


@pytest.fixture
def protocol() -> str:
    return "httptools"


@pytest.fixture
async def server(start_server: StartServer) -> Server:
    return await start_server()


def chat(number: int, **body: Any) -> Line:
    content = {"role": "user", "content": f"Number {number}"}
    body = {"model": MODEL, "messages": [content], "max_tokens": 4, **body}
    return Line(f"r{number}", "/v1/chat/completions", body)


async def run(server: Server, lines: list[Line], **options: Any) -> tuple[list[Any], Any]:
    file = io.BytesIO()
    async with httpx.AsyncClient(base_url=server.url, timeout=30.0, verify=False) as client:
        totals = await answer_all(client, lines, file, **options)
    return [json.loads(text) for text in file.getvalue().splitlines()], totals


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (the engine has no event for it)
            await asyncio.sleep(0.005)


async def test_every_line_is_answered_once(server: Server) -> None:
    lines = [chat(n) for n in range(20)]
    lines.append(Line("text", "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 3}))
    lines.append(Line("wrong", "/v1/completions", {"model": MODEL, "prompt": "x", "top_p": 7}))
    lines.append(Line("vector", "/v1/embeddings", {"model": MODEL, "input": "x"}))
    answers, totals = await run(server, lines, concurrency=4)
    assert sorted(answer["custom_id"] for answer in answers) == sorted(
        line.custom_id for line in lines
    )
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert by_id["r3"]["response"]["body"]["choices"][0]["message"]["content"]
    assert by_id["wrong"]["response"]["status_code"] == 400
    assert by_id["wrong"]["response"]["body"]["error"]["param"] == "top_p"
    assert (totals.num_done, totals.num_failed) == (22, 1)
    assert totals.num_completion_tokens == 20 * 4 + 3


async def test_requests_stand_behind_all_others_and_promise_nothing(server: Server) -> None:
    await run(server, [chat(0), chat(1, priority=3, slo={"tbt_ms": 50.0})], concurrency=1)
    first, second = server.engine.seen
    assert (first.priority, first.objective) == (LAST, Objective(tbt_s=3600.0, ttft_s=3600.0))
    assert (second.priority, second.objective) == (3, Objective(tbt_s=0.05))
    promised = [asked.objective for asked in server.engine.asked[1:]]
    assert promised == [Objective()] * 2  # the deployment's


async def test_nothing_is_sent_without_slack(server: Server) -> None:
    server.engine.quoted = Quote(False, retry_after_s=0.05)
    running = asyncio.create_task(run(server, [chat(n) for n in range(6)], concurrency=3))
    await until(lambda: len(server.engine.asked) >= 8)
    assert not server.engine.seen
    server.engine.quoted = Quote(True)
    answers, _ = await asyncio.wait_for(running, 20)
    assert len(answers) == 6


async def test_a_terminal_is_told_what_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr("app.cli.batch.console", terminal)
    server.engine.quoted = Quote(False, retry_after_s=0.05)
    running = asyncio.create_task(run(server, [chat(n) for n in range(3)]))
    await until(lambda: "0/3 answered, 0 failed" in screen.getvalue())
    await until(lambda: "waiting for room beside live streams" in screen.getvalue())
    server.engine.quoted = Quote(True)
    answers, _ = await asyncio.wait_for(running, 20)
    assert len(answers) == 3


@pytest.mark.parametrize("prompt", ["abc", [4, 5, 6]])
async def test_a_quote_is_of_the_model_and_the_tokens_of_the_request(
    server: Server, prompt: str | list[int]
) -> None:
    server.engine.quoted = Quote(False, retry_after_s=0.05)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 5}
    line = Line("a", "/v1/completions", body)
    running = asyncio.create_task(run(server, [line]))
    await until(lambda: len(server.engine.asked) >= 4)
    server.engine.quoted = Quote(True)
    await asyncio.wait_for(running, 20)
    first, *others = server.engine.asked
    assert first.num_prompt_tokens == 1  # whether there are quotes at all
    assert {(asked.num_prompt_tokens, asked.max_tokens) for asked in others} == {(3, 5)}
    answers, _ = await run(server, [Line("b", "/v1/completions", {**body, "model": "other"})])
    assert answers[0]["response"]["body"]["error"]["code"] == "model_not_found"


async def test_what_is_refused_for_now_comes_again(server: Server) -> None:
    server.engine.refusal = RequestRefused("later", retry_after_s=1.0)
    running = asyncio.create_task(run(server, [chat(0)]))
    await until(lambda: bool(server.engine.seen))
    server.engine.refusal = None
    answers, totals = await asyncio.wait_for(running, 20)
    assert (len(answers), totals.num_done) == (1, 1)


async def test_what_is_left_when_the_time_is_over_fails(server: Server) -> None:
    server.engine.quoted = Quote(False, retry_after_s=0.05)
    answers, totals = await run(server, [chat(0), chat(1)], give_up_s=0.2)
    assert [answer["error"]["code"] for answer in answers] == ["batch_expired"] * 2
    assert totals.num_failed == 2


def kept(out: Path) -> set[str]:
    answered, file = keep_answers(out)
    file.close()
    return answered


def test_a_file_that_a_batch_writes_is_no_other_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a file of that name was opened before it was replaced."""
    out = tmp_path / "out.jsonl"
    done = {"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
    out.write_text(json.dumps(done))
    with out.open("ab") as former:
        answered, file = keep_answers(out)
        fcntl.flock(former, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one that comes too late
    with file:
        source = tmp_path / "in.jsonl"
        source.write_text('{"custom_id": "b", "url": "/v1/completions", "body": {}}')
        url = ["--url", "http://127.0.0.1:1"]
        second = CliRunner().invoke(app, ["batch", str(source), str(out), *url])
        assert second.exit_code == 2
        assert "out.jsonl: another `legato batch` writes to it" in second.output
        file.write(b"next")
    assert answered == {"a"}
    assert out.read_text() == json.dumps(done) + "\nnext"


def test_the_output_keeps_answers_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert kept(out) == set()
    done = {"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
    failed = {"custom_id": "b", "response": {"status_code": 500, "body": {}}, "error": None}
    expired = {"custom_id": "c", "response": None, "error": {"code": "batch_expired"}}
    texts = [json.dumps(line) for line in (done, failed, expired, done)]
    out.write_text("\n".join(texts) + '\n{"custom_id": "d", "resp')
    assert kept(out) == {"a"}
    assert out.read_text() == texts[0] + "\n"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_one_and_its_file_is_written(tmp_path: Path, exists: bool) -> None:
    real, out = tmp_path / "folder" / "real.jsonl", tmp_path / "out.jsonl"
    real.parent.mkdir()
    out.symlink_to(Path("folder", "real.jsonl"))
    if exists:
        real.write_text('{"custom_id": "b", "response": null}\n')
    answered, file = keep_answers(out)
    with file:
        file.write(b"next")
    assert (answered, out.is_symlink(), real.read_text()) == (set(), True, "next")


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_keeps_who_may_read_it(tmp_path: Path, mode: int) -> None:
    out = tmp_path / "out.jsonl"
    out.touch()
    out.chmod(mode)
    kept(out)
    assert stat.S_IMODE(out.stat().st_mode) == mode


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {}}\n', 1),  # IN given as OUT
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {}}', 1),
        (b'{"custom_id": "a", "response": null}\n\nmy notes\n', 3),
        (b"my notes", 1),
        (b"\xff\xfe\n", 1),
    ],
)
def test_a_file_that_is_not_of_answers_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, line: int
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(content)
    with pytest.raises(typer.Exit) as ended:
        keep_answers(out)
    assert ended.value.exit_code == 2
    assert f"out.jsonl:{line}: not an answer" in capsys.readouterr().err
    assert out.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "said"), [("", "is no file"), ("no/x", "No such file"), ("loop", "Too many levels")]
)
def test_answers_that_could_not_be_written_are_not_asked_for(
    tmp_path: Path, name: str, said: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {}}')
    (tmp_path / "loop").symlink_to("loop")
    url = ["--url", "http://127.0.0.1:1"]
    result = CliRunner().invoke(app, ["batch", str(source), str(tmp_path / name), *url])
    assert result.exit_code == 2
    assert said in result.stderr


async def test_without_a_valid_key_nothing_is_sent(
    start_server: StartServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await start_server(ApiOptions(api_keys={"ké": KeyLimits()}))
    out = tmp_path / "out.jsonl"
    with out.open("wb") as file:
        with pytest.raises(typer.Exit):
            await _run([chat(0)], file, server.url, "other", 1, 60.0)
        said = capsys.readouterr().err
        assert "Give a valid API key" in said
        assert "--api-key" in said
        assert file.tell() == 0
        totals = await _run([chat(0)], file, server.url, "ké", 1, 60.0)
    assert totals.num_done == 1


def test_a_line_ends_where_its_file_says_so(tmp_path: Path) -> None:
    """A text may hold the separators that Unicode calls ends of lines, and a file begin with a byte
    order mark."""
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x\u2028y\x85z\f"}}
    file = tmp_path / "in.jsonl"
    for end in ("\n", "\r\n"):
        texts = [json.dumps({**line, "custom_id": n}, ensure_ascii=False) for n in "ab"]
        file.write_bytes("\ufeff".encode() + end.join(texts).encode())
        assert [found.body for found in read_lines(file)] == [line["body"]] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"custom_id": ""}, "custom_id"),
        ({"method": "GET"}, "method"),
        ({"url": "/v1/files"}, "url"),
        ({"body": 3}, "body"),
        ({"body": {"stream": True}}, "body.stream"),
    ],
)
def test_a_wrong_line_is_named_before_any_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, said: str
) -> None:
    file = tmp_path / "in.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    file.write_text(json.dumps(line) + "\n\n" + json.dumps({**line, **change}))
    with pytest.raises(typer.Exit):
        read_lines(file)
    assert f"in.jsonl:3: {said}: " in capsys.readouterr().err


def test_two_lines_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "in.jsonl"
    line = json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {}})
    file.write_text(f"{line}\n{line}\n")
    with pytest.raises(typer.Exit):
        read_lines(file)
    assert "'a' appears twice" in capsys.readouterr().err
