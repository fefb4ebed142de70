"""Legato and transformers' continuous batching on the same model shape, lengths and arrivals.

Both run in this process without a server, greedy, with random weights, so what is compared is
scheduling and kernels. Transformers' manager takes token ids and says when each token came.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.calibration.measure import EngineLimits, calibrate
from actors.scheduling.cost.model import CostModel
from actors.scheduling.plan import StepPlan, StepResult
from app.bench.engine.stage import LoadedStage
from app.bench.gpu.live import LiveRun
from app.simulate.run.record import RunRecord, summarize
from app.simulate.run.simulation import scheduler_config
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import scaled, sharegpt4
from app.simulate.workload.requests import Workload, generate

TBT_S = 0.05  # the objective of Legato's budget; transformers has none
LOADS = ((0.0, 32), (8.0, 64))  # requests per second (0: all at once), and how many
_VOCABULARY = 4000  # of random prompts
_ENDS_WITHIN_S = 10.0  # for the manager
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class PeerRow:
    """server: and how it attends. qps: of the arrivals; 0 where all requests come at once.

    prompt_tokens: of all requests. num_completed: within the time limit. Times in milliseconds.
    """

    server: str
    qps: float
    num_requests: int
    num_completed: int
    prompt_tokens: int
    output_tokens_per_s: float
    span_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    tbt_max_ms: float


def workload_of(count: int, qps: float, divisor: float = 4.0, seed: int = 1) -> Workload:
    """ShareGPT's lengths / divisor by Poisson arrivals; qps 0: all at once."""
    drawn = generate(poisson(qps or 1.0), scaled(sharegpt4(), divisor), count, seed=seed)
    return drawn if qps else replace(drawn, arrival_s=np.zeros(count))


def row_of(server: str, qps: float, workload: Workload, record: RunRecord) -> PeerRow:
    found = summarize(record)
    return PeerRow(
        server=server,
        qps=qps,
        num_requests=len(workload),
        num_completed=found.num_completed,
        prompt_tokens=int(workload.prompt_tokens.sum()),
        output_tokens_per_s=found.output_tokens_per_s,
        span_s=found.span_s,
        ttft_p50_ms=1000 * found.ttft_p50,
        ttft_p99_ms=1000 * found.ttft_p99,
        tbt_p50_ms=1000 * found.tbt_p50,
        tbt_p99_ms=1000 * found.tbt_p99,
        tbt_max_ms=1000 * found.tbt_max,
    )


# ---- Legato ------------------------------------------------------------------------------------


def cost_model_of(stage: LoadedStage) -> CostModel:
    """The cost model of a stage, measured as an engine does when it starts."""
    spec = stage.spec
    limits = EngineLimits(
        max_step_tokens=spec.max_step_tokens,
        max_requests=spec.max_requests,
        max_model_len=spec.max_model_len,
        kv_tokens=stage.kv_tokens,
        block_size=spec.block_size,
    )
    base = CostModel(
        "peer", tokens_s=((1, 1.0),), kv_tokens=stage.kv_tokens, max_model_len=spec.max_model_len
    )

    async def execute(plan: StepPlan) -> StepResult:
        begin_s = time.monotonic()
        result = stage.runner.execute(plan, None)
        if not isinstance(result, StepResult):
            raise TypeError("the whole model must be in one stage")
        return replace(result, stage_times_s=((begin_s, time.monotonic()),))

    return asyncio.run(calibrate(execute, limits, base, time.monotonic)).model


def run_legato(
    stage: LoadedStage, model: CostModel, qps: float, workload: Workload, give_up_after_s: float
) -> PeerRow:
    """The default budget, adaptive to `TBT_S`; where all requests come at once, 2048 tokens."""
    spec = stage.spec
    config = scheduler_config(
        model,
        budget="auto" if qps else "fixed",
        token_budget=None if qps else min(2048, spec.max_step_tokens),
        tbt_s=TBT_S if qps else None,
        max_requests=spec.max_requests,
        block_size=spec.block_size,
        max_step_tokens=spec.max_step_tokens,
        lookahead=True,  # as the live engine runs
    )
    run = LiveRun(stage.runner, config, workload)
    run.run(give_up_after_s)
    return row_of(f"legato {stage.info.backend}", qps, workload, run.record)


# ---- transformers ------------------------------------------------------------------------------


def random_model(folder: Path, device: torch.device, attention: str) -> Any:
    """The shape as transformers' model in bfloat16, its weights drawn on the device.

    attention: transformers' name of it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads((folder / "config.json").read_text())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
    rotary = type(model.model.rotary_emb)(config=config).to(device)  # it holds no weights
    model = model.to_empty(device=device).eval()
    model.model.rotary_emb = rotary
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
    model.tie_weights()
    model.generation_config.update(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16
    )
    return model


class PeerRun:
    """One workload through transformers' manager, whose thread computes while this one submits
    requests. Tokens are counted from when that thread has them: streaming them out would cost it
    more than their steps.
    """

    def __init__(self, model: Any, workload: Workload, **sizes: int) -> None:
        """sizes: of the manager's cache and batches, where it should not take all free memory."""
        from transformers import ContinuousBatchingConfig

        # Random prompts share nothing: sharing blocks would only cost time.
        config = ContinuousBatchingConfig(allow_block_sharing=False, **sizes)
        self._manager = model.init_continuous_batching(continuous_batching_config=config)
        self._workload = workload
        self.record = RunRecord(len(workload))
        self.record.arrival_s = workload.arrival_s.tolist()
        rng, most = np.random.default_rng(0), min(_VOCABULARY, model.config.vocab_size)
        self._prompts = [rng.integers(3, most, n).tolist() for n in workload.prompt_tokens]
        self._begin_s = 0.0

    def run(self, give_up_after_s: float) -> RunRecord:
        """Raises RuntimeError if the manager ends early or fails a request."""
        self._manager.warmup()
        self._manager.start()
        try:
            self._serve(give_up_after_s)
        finally:
            self._manager.stop(block=True, timeout=_ENDS_WITHIN_S, hard_stop=True)
        while (given_up := self._manager.get_result(timeout=0.01)) is not None:
            self._take(given_up)
        return self.record

    def _serve(self, give_up_after_s: float) -> None:
        arrivals, index, num_open = self.record.arrival_s, 0, 0
        self._begin_s = time.perf_counter()
        while index < len(arrivals) or num_open:
            now_s = time.perf_counter() - self._begin_s
            if now_s > give_up_after_s:
                break
            while index < len(arrivals) and arrivals[index] <= now_s:
                self._manager.add_request(
                    self._prompts[index],
                    request_id=str(index),
                    max_new_tokens=int(self._workload.output_tokens[index]),
                    record_timestamps=True,
                    eos_token_id=-1,
                )
                index += 1
                num_open += 1
            due_s = arrivals[index] - now_s if index < len(arrivals) else _LOOK_S
            result = self._manager.get_result(timeout=max(0.0005, min(due_s, _LOOK_S)))
            if result is not None:
                if result.error is not None:
                    raise RuntimeError(f"transformers failed a request: {result.error}")
                self._take(result)
                self.record.finished_s[int(result.request_id)] = (
                    result.timestamps[-1] - self._begin_s
                )
                num_open -= 1
            elif not self._manager.is_running():
                raise RuntimeError("transformers' manager has ended")
        self.record.end_s = time.perf_counter() - self._begin_s

    def _take(self, result: Any) -> None:
        record, i = self.record, int(result.request_id)
        times_s = [at_s - self._begin_s for at_s in result.timestamps or ()]
        if times_s:
            gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
            record.first_token_s[i], record.last_token_s[i] = times_s[0], times_s[-1]
            record.num_output_tokens[i] = len(times_s)
            record.gaps_s.extend(gaps_s)
            record.max_gap_s[i] = max(gaps_s, default=0.0)


def attention() -> str:
    """The fastest that transformers can attend with here; its manager makes it a paged one."""
    from transformers.utils import is_flash_attn_2_available

    return "flash_attention_2" if is_flash_attn_2_available() else "sdpa"


def run_transformers(
    model: Any, qps: float, workload: Workload, give_up_after_s: float, **sizes: int
) -> PeerRow:
    """sizes: see `PeerRun`."""
    try:
        record = PeerRun(model, workload, **sizes).run(give_up_after_s)
    finally:
        release()  # its cache
    return row_of(f"transformers {model.config._attn_implementation}", qps, workload, record)


def release() -> None:
    """Return what is no longer held to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare(
    folder: Path,
    device: torch.device,
    stage: LoadedStage,
    loads: Sequence[tuple[float, int]],
    give_up_after_s: float = 15.0,
    **sizes: int,
) -> Iterator[PeerRow]:
    """Rows of both, at every load (requests per second, number of requests); closes the stage
    before transformers' model is made, for both do not fit one GPU. sizes: see `PeerRun`."""
    try:
        model = cost_model_of(stage)
        for qps, count in loads:
            yield run_legato(stage, model, qps, workload_of(count, qps), give_up_after_s)
    finally:
        stage.close()
    release()
    peer = random_model(folder, device, attention())
    for qps, count in loads:
        workload = workload_of(count, qps)
        yield run_transformers(peer, qps, workload, give_up_after_s, **sizes)
