"""Plans of `legato bench compare`: those shipped are valid, wrong ones are refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

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


def test_servers_of_a_pair_differ_in_speculation_alone() -> None:
    plan = read("compare_speculation.yaml")
    pairs = [
        (server, plan.servers[server.plain]) for server in plan.servers.values() if server.plain
    ]
    assert len(pairs) * 2 == len(plan.servers)
    for fast, plain in pairs:
        assert fast.url == plain.url
        assert fast.environment == plain.environment
    legato, plain = (
        load_config(ROOT / shlex.split(plan.servers[name].command)[2])["applications"][0]["args"]
        for name in ("legato", "legato-plain")
    )
    assert plain == {**legato, "speculation": {"drafter": "none"}}
    for fast, other in pairs[1:]:
        assert shlex.split(fast.command)[: len(shlex.split(other.command))] == shlex.split(
            other.command
        )


def test_what_is_copied_is_long_enough_and_what_is_told_is_new() -> None:
    probe = read("compare_speculation.yaml").speculation
    assert probe is not None
    prompts = probe.prompts()
    for prompt in prompts["copying"]:
        assert len(prompt) == probe.text_tokens + probe.begun_tokens
        assert prompt[: probe.begun_tokens] == prompt[probe.text_tokens :]
    assert probe.begun_tokens + probe.output_tokens <= probe.text_tokens, "else there is an end"
    for each in prompts.values():
        assert len({tuple(prompt) for prompt in each}) == len(each), "a prompt is asked once"
