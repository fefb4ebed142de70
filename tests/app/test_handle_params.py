"""Parameters of a Python handle call: every one works or is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from actors.scheduling.request import Grammar, Objective
from app.api.sampling_params import LEAST_TOP_P, SEEDS
from app.engine_client.client import ModelCard
from app.handle_params import parse_params

CARD = ModelCard("tiny", "/models/tiny", 100, 64, (2, 3), 0)


def test_defaults_fill_the_context_and_stop_at_the_end_of_sequence() -> None:
    call = parse_params({}, 10, CARD)
    assert call.sampling.max_tokens == 90
    assert call.sampling.temperature == 0.0
    assert call.sampling.stop_token_ids == (2, 3)
    assert (call.tenant, call.priority, call.objective, call.output) == ("", 0, Objective(), ())
    own = {"stop_token_ids": (9,)}
    assert parse_params(own, 10, CARD, (3, 5)).sampling.stop_token_ids == (9, 2, 3, 5)
    own = {"stop_token_ids": (9,), "ignore_eos": True}
    assert parse_params(own, 10, CARD, (3, 5)).sampling.stop_token_ids == (9,)


def test_an_unseeded_draw_gets_a_seed_of_its_own() -> None:
    seeds = {parse_params({"temperature": 1.0}, 10, CARD).sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    assert parse_params({"seed": 7}, 10, CARD).sampling.seed == 7


def test_what_http_takes_means_the_same_here() -> None:
    given = {"top_k": -1, "top_p": 0.0, "min_p": None, "seed": -1, "repetition_penalty": 1}
    sampling = parse_params(given, 10, CARD).sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (0, LEAST_TOP_P, 0.0)
    assert (sampling.seed, sampling.repetition_penalty) == (SEEDS - 1, 1.0)
    counted = {"top_k": np.int64(5), "min_p": np.float32(0.5), "min_tokens": np.int32(3)}
    sampling = parse_params(counted, 10, CARD).sampling
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens) == (5, 0.5, 3)
    assert parse_params({"logit_bias": ((4, 1), (5, -2.0))}, 10, CARD).sampling.logit_bias == (
        (4, 1.0),
        (5, -2.0),
    )


def test_none_is_as_if_it_were_not_given() -> None:
    names = ("temperature", "priority", "output", "stop_token_ids", "grammar", "slo", "max_tokens",
             "logprobs", "tenant", "ignore_eos", "logit_bias", "top_k", "min_tokens")  # fmt: skip
    given = parse_params(dict.fromkeys(names) | {"seed": 1}, 10, CARD)
    assert given == parse_params({"seed": 1}, 10, CARD)


def test_everything_that_may_be_said() -> None:
    call = parse_params(
        {
            "max_tokens": 90,
            "top_k": 5,
            "logit_bias": {"4": -1.5},
            "grammar": {"kind": "regex", "text": "a+"},
            "slo": {"tbt_ms": 50, "ttft_ms": 2000},
            "priority": 3,
            "tenant": "red",
            "ignore_eos": True,
            "stop_token_ids": [9],
            "output": np.array([1, 2]),
        },
        10,
        CARD,
    )
    assert call.sampling.max_tokens == 90
    assert call.sampling.top_k == 5
    assert call.sampling.logit_bias == ((4, -1.5),)
    assert call.sampling.grammar == Grammar("regex", "a+")
    assert call.sampling.stop_token_ids == (9,)
    assert (call.objective, call.priority) == (Objective(0.05, 2.0), 3)
    assert (call.tenant, call.output) == ("red", (1, 2))


@pytest.mark.parametrize(
    ("params", "num_prompt_tokens", "named"),
    [
        ({"temprature": 1.0}, 10, "temprature"),
        ({}, 0, "prompt"),
        ({}, 100, "prompt"),
        ({"max_tokens": 0}, 10, "max_tokens"),
        ({"max_tokens": 91}, 10, r"max_tokens: .*\[1, 90\].* 10 of 100"),
        ({"temperature": -0.1}, 10, "temperature"),
        ({"temperature": 1e9}, 10, "temperature"),
        ({"temperature": math.nan}, 10, "temperature"),
        ({"top_k": 2**31}, 10, "top_k: .*, not 2147483648"),
        ({"top_k": 1.5}, 10, "top_k"),
        ({"top_p": 1.01}, 10, "top_p"),
        ({"top_p": math.nan}, 10, "top_p"),
        ({"min_p": -0.1}, 10, "min_p"),
        ({"min_p": math.inf}, 10, "min_p"),
        ({"repetition_penalty": 0}, 10, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, 10, "repetition_penalty"),
        ({"presence_penalty": math.inf}, 10, "presence_penalty"),
        ({"frequency_penalty": math.nan}, 10, "frequency_penalty"),
        ({"seed": 2**63}, 10, "seed"),
        ({"seed": "x"}, 10, "seed"),
        ({"min_tokens": -1}, 10, "min_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, 10, "min_tokens: more than the 4"),
        ({"logit_bias": {4: math.nan}}, 10, "logit_bias"),
        ({"logit_bias": {4: 1e9}}, 10, "logit_bias"),
        ({"logit_bias": {64: 1.0}}, 10, "logit_bias: token id 64"),
        ({"logit_bias": {"x": 1.0}}, 10, "logit_bias: must map"),
        ({"logit_bias": 5}, 10, "logit_bias: must map"),
        ({"stop_token_ids": [64]}, 10, "stop_token_ids: token id 64"),
        ({"stop_token_ids": [1.5]}, 10, "stop_token_ids: must be token ids"),
        ({"output": [1.0]}, 10, "output: must be token ids"),
        ({"output": "ab"}, 10, "output: must be token ids"),
        ({"grammar": "abc"}, 10, "grammar: .*, not abc"),
        ({"grammar": {"kind": "regex"}}, 10, "grammar.text"),
        ({"grammar": {"kind": "nonsense", "text": "5"}}, 10, "grammar.kind"),
        ({"grammar": Grammar("regex", 5)}, 10, "grammar.text"),  # type: ignore[arg-type]
        ({"logprobs": -5}, 10, "logprobs"),
        ({"logprobs": "x"}, 10, "logprobs"),
        ({"logprobs": 10**9}, 10, "logprobs: more than the 64"),
        ({"prompt_logprobs": 65}, 10, "prompt_logprobs: more than the 64"),
        ({"slo": {"tbt": 50}}, 10, "slo.tbt"),
        ({"slo": {"tbt_ms": math.nan}}, 10, "slo.tbt_ms"),
        ({"slo": 50}, 10, "slo: .*, not 50"),
        ({"max_tokens": 2.9}, 10, "max_tokens: .*, not 2.9"),
        ({"priority": "high"}, 10, "priority"),
        ({"tenant": 5}, 10, "tenant"),
        ({"user": "red"}, 10, "unknown parameter 'user'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    params: dict[str, Any], num_prompt_tokens: int, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        parse_params(params, num_prompt_tokens, CARD)
