"""Uniform micro-batches, which keep the stages of a pipeline equally busy.

A stage idles when consecutive micro-batches take different times (Sarathi-Serve, section 3.3): PB1
prompts of different lengths, PB2 a prompt beside decodes, PB3 decodes of different context lengths.
So decodes and prefill tokens are distributed over the micro-batches in flight (as in gLLM's token
throttling) instead of all going into the first.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from actors.scheduling.interfaces import EngineView, pending_tokens
from actors.scheduling.state import RequestState

_LEAST_PREFILL = 32  # a smaller chunk is not worth a step


def decode_share(engine: EngineView, depth: int) -> int:
    """Decodes that one of `depth` micro-batches should hold."""
    return -(-len(engine.decoding) // depth)


def prefill_share(engine: EngineView, depth: int, num_tokens: int) -> int:
    """Tokens (with the `num_tokens` decodes already in it) that this micro-batch should hold.

    Everything computable now and the prompts' tokens in flight, spread over the pipeline: of what
    is left alone, a lone prompt would get half, a quarter, an eighth.
    """
    computing = sum([step.num_prompt_tokens for step in engine.in_flight])
    total = pending_tokens(engine) + computing + len(engine.decoding)
    return max(-(-total // depth), num_tokens + _LEAST_PREFILL)


def within(ready: list[RequestState], most: int) -> int:
    """How many decodes fit `most` tokens, whichever they are; one goes on in any case."""
    lengths = sorted([state.decode_length for state in ready], reverse=True)
    return max(min(1, most), bisect_right(list(accumulate(lengths)), most))


def spread(ready: list[RequestState], count: int) -> list[RequestState]:
    """Choose `count` decodes: those that waited longest, and among equals a mix of context lengths.

    By age none is skipped twice; evenly spaced context lengths give this micro-batch the average
    attention work. Returned in the order of `ready`.
    """
    if count >= len(ready):
        return ready
    if count < 1:
        return []
    by_age = sorted(ready, key=lambda state: (state.step_id, state.num_tokens))
    newest = by_age[count - 1].step_id  # of those chosen
    older = [state for state in by_age if state.step_id < newest]
    equals = [state for state in by_age if state.step_id == newest]
    places = count - len(older)
    chosen = {id(state) for state in older}
    chosen.update(id(equals[k * len(equals) // places]) for k in range(places))
    return [state for state in ready if id(state) in chosen]
