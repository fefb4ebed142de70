"""Plans of `legato bench compare`: those shipped are valid, wrong ones are refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from tokenizers import Tokenizer

from app.bench.plan import ComparisonPlan
from app.cli.serve_config import load_config

ROOT = Path(__file__).resolve().parents[3]


def read(name: str) -> ComparisonPlan:
    return ComparisonPlan.model_validate(
        yaml.safe_load((ROOT / f"configs/bench/{name}").read_text())
    )


def test_an_unknown_probe_is_refused() -> None:
    with pytest.raises(ValidationError, match="decodes"):
        ComparisonPlan.model_validate({"servers": {}, "decodes": {}})


def test_a_server_without_its_plain_one_is_refused() -> None:
    server = {"command": "serve", "url": "http://h:1", "plain": "slow"}
    with pytest.raises(ValidationError, match=r"servers.fast.plain: no server 'slow'"):
        ComparisonPlan.model_validate({"servers": {"fast": server}})


def pair(plain_url: str, url: str) -> ComparisonPlan:
    plain = {"command": "serve", "url": plain_url}
    fast = {"command": "serve", "url": url, "plain": "slow"}
    return ComparisonPlan.model_validate({"servers": {"slow": plain, "fast": fast}})


@pytest.mark.parametrize(
    "url",
    ["http://localhost:81", "http://127.0.0.1:81/", "http://LocalHost:81/v1", "http://[::1]:81"],
)
def test_two_servers_of_a_pair_cannot_share_an_address(url: str) -> None:
    with pytest.raises(ValidationError, match=r"servers.fast.url: .*'slow'"):
        pair("http://localhost:81", url)
    with pytest.raises(ValidationError, match=r"servers.fast.url: .*'slow'"):
        pair(url, "http://127.0.0.1:81")


def test_an_address_without_a_port_has_that_of_its_scheme() -> None:
    with pytest.raises(ValidationError, match=r"servers.fast.url"):
        pair("http://h", "http://h:80/")
    for plain_url, url in (
        ("http://h", "https://h"),
        ("http://h:1", "http://h:2"),
        ("http://h:1", "http://g:1"),
        ("http://127.0.0.1:1", "http://127.0.0.2:1"),
    ):
        assert pair(plain_url, url).servers["fast"].url == url


def test_servers_of_a_pair_differ_in_speculation_alone() -> None:
    plan = read("compare_speculation.yaml")
    pairs = [
        (server, plan.servers[server.plain]) for server in plan.servers.values() if server.plain
    ]
    plain_ones = {server.plain for server in plan.servers.values() if server.plain}
    assert plain_ones | {n for n, s in plan.servers.items() if s.plain} == set(plan.servers)
    for fast, plain in pairs:
        assert fast.url != plain.url
        assert fast.environment == plain.environment
    legato, plain = (
        load_config(ROOT / shlex.split(plan.servers[name].command)[2])["applications"][0]["args"]
        for name in ("legato", "legato-plain")
    )
    assert plain == {**legato, "speculation": {"drafter": "none"}}
    for fast, other in pairs[1:]:
        port, other_port = (server.url.rpartition(":")[2] for server in (fast, other))
        words = shlex.split(other.command.replace(other_port, port))
        assert shlex.split(fast.command)[: len(words)] == words


def test_every_prompt_is_asked_once_and_what_is_copied_is_in_it() -> None:
    probe = read("compare_speculation.yaml").speculation
    assert probe is not None
    prompts = probe.prompts()
    assert len(prompts["copying"]) == len(probe.texts)
    for each in prompts.values():
        assert len({tuple(prompt) for prompt in each}) == len(each)
    tokenizer = Tokenizer.from_file(str(ROOT / probe.tokenizer / "tokenizer.json"))
    for text, prompt in zip(probe.texts, prompts["copying"], strict=True):
        begin = tokenizer.encode((ROOT / text).read_text()).ids[: probe.text_tokens]
        assert tokenizer.decode(begin) in tokenizer.decode(prompt)
        assert len(begin) == probe.text_tokens >= probe.output_tokens
