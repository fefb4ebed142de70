"""`legato bench speculation`: tokens per second with drafts and without, and whether text differs.

The real core plans for one real stage in this process, step by step, so what is measured is the
stages' work and the planning; what the transport overlaps of it is not there. Random weights copy
nothing: their drafts are the known answer, each right with the chance asked for, and at temperature
1 they repeat nothing. Of a trained model, prompt lookup drafts what it copies or repeats. With a
draft model there are tasks in which that one drafts.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from actors.scheduling.build import build_core
from actors.scheduling.config import DEFAULT_MAX_DRAFTS, SchedulerConfig
from actors.scheduling.events import Emit, Event, Execute, StepDone, Submit
from actors.scheduling.interfaces import Drafter
from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.request import Request, SamplingParams
from app.bench.engine.profile import fit_cost_model
from app.bench.engine.stage import BLOCK_SIZE, DEFAULT_SHAPE, LoadedStage
from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, console, output, table
from app.paths import locate
from app.settings.model_folder import read_cost_model

_PROMPT = 128


@dataclass(frozen=True, slots=True)
class Task:
    """One workload. chance: probability that a draft is right; None: prompt lookup, or with_model
    a draft model. copies: the answer repeats the prompt."""

    name: str
    streams: int = 1
    chance: float | None = None
    copies: bool = False
    temperature: float = 0.0
    with_model: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """Medians of the repeats. speed_up: with drafts over without, of runs in succession."""

    task: str
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    speed_up: float
    accepted: int
    drafted: int
    same_text: bool


class KnownAnswer:
    """A drafter for random weights: the known answer, each token right with a given probability."""

    rest = 0

    def __init__(self, answer: Sequence[int], chance: float, seed: int) -> None:
        self.acceptance_rate = chance
        draw = random.Random(seed)
        self._drafts = [t if draw.random() < chance else t ^ 1 for t in answer]
        self._known = 0

    def follow(self, output: Sequence[int]) -> bool:
        self._known = len(output)
        return True

    def draft(self, most: int) -> tuple[int, ...]:
        return tuple(self._drafts[self._known : self._known + most])


@dataclass(slots=True)
class Served:
    """The result of one run."""

    seconds: float
    answers: list[list[int]]
    num_drafts: int
    num_accepted: int


def serve(
    stage: LoadedStage, config: SchedulerConfig, requests: Sequence[Request],
    drafters: Sequence[Drafter] = (),
) -> Served:  # fmt: skip
    """Run the requests to their end; timed from the end of the last prefill."""
    core = build_core(config)
    answers: dict[int, list[int]] = {r.request_id: [] for r in requests}
    plans = deque[StepPlan]()

    def send(event: Event) -> None:
        for instruction in core.handle(event, time.monotonic()):
            if isinstance(instruction, Execute):
                plans.append(instruction.plan)
            elif isinstance(instruction, Emit):
                for out in instruction.outputs:
                    answers[out.request_id] += out.tokens

    for request in requests:
        send(Submit(request))
    for request, drafter in zip(requests, drafters, strict=False):
        core.live_requests[request.request_id].drafter = drafter
    begin_s, begun = time.perf_counter(), 0
    while plans:
        result = stage.runner.execute(plans.popleft(), None)
        assert isinstance(result, StepResult)
        send(StepDone(result))
        if core.view.prefilling or core.view.num_waiting:
            begin_s, begun = time.perf_counter(), sum(map(len, answers.values()))
    seconds = time.perf_counter() - begin_s
    tokens = sum(map(len, answers.values()))
    return Served(
        seconds / max(1, tokens - begun), list(answers.values()), core.speculation.num_drafts,
        core.outcomes.num_accepted_drafts,
    )  # fmt: skip


def measure(
    stage: LoadedStage, task: Task, config: SchedulerConfig, drafter: str, num_tokens: int,
    repeats: int,
) -> Rates:  # fmt: skip
    """Alternate runs with and without drafts, because shared machines drift."""
    requests = [_request(task, number, num_tokens) for number in range(task.streams)]
    plain, drafted = list[Served](), list[Served]()
    draft_model = stage.spec.draft_model_path if task.with_model else None
    with_drafts = replace(config, drafter=drafter, draft_model=draft_model)
    for _ in range(repeats + 1):
        plain.append(serve(stage, config, requests))
        known: list[Drafter] = []
        if task.chance is not None:
            answers = enumerate(plain[0].answers)
            known = [KnownAnswer(answer, task.chance, i) for i, answer in answers]
        drafted.append(serve(stage, with_drafts, requests, known))
    before, after = (statistics.median(s.seconds for s in runs[1:]) for runs in (plain, drafted))
    pairs = zip(plain[1:], drafted[1:], strict=True)
    speed_up = statistics.median(one.seconds / other.seconds for one, other in pairs)
    return Rates(
        task.name, 1 / before, 1 / after, speed_up, drafted[-1].num_accepted,
        drafted[-1].num_drafts, all(run.answers == plain[0].answers for run in drafted + plain),
    )  # fmt: skip


def _request(task: Task, number: int, num_tokens: int) -> Request:
    draw = random.Random(number)
    prompt = [draw.randrange(10, 4000) for _ in range(_PROMPT)]
    if task.copies:
        prompt += prompt[: _PROMPT // 4]
    sampling = SamplingParams(num_tokens, temperature=task.temperature, seed=number)
    return Request(number, tuple(prompt), sampling, 0.0)


def command(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="A folder with config.json.")] = DEFAULT_SHAPE,
    trained: Annotated[
        bool, typer.Option(help="Read the folder's weights; random ones otherwise.")
    ] = False,
    cost_model: Annotated[
        str | None,
        typer.Option(help="As `legato profile` writes it; measured on this stage if absent."),
    ] = None,
    draft_model: Annotated[
        Path | None,
        typer.Option(help="A folder with the same vocabulary, read as --model is."),
    ] = None,
    chance: Annotated[
        float, typer.Option(min=0, max=1, help="Of a known draft to be right.")
    ] = 0.8,
    streams: Annotated[int, typer.Option(min=1, help="Of the tasks with many.")] = 32,
    tokens: Annotated[int, typer.Option(min=8, help="Of each answer.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="After one that warms up.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Tokens per second with drafts and without: drafts of known acceptance, text without repeats,
    copying, one stream and many."""
    model = locate(model)
    if not (model / "config.json").exists():
        raise typer.BadParameter(f"no {model / 'config.json'}", param_hint="--model")
    if trained:
        tasks = [Task("copy", copies=True), Task(f"copy, {streams} streams", streams, copies=True)]
    else:
        tasks = [
            Task(f"right {chance:.0%}", 1, chance),
            Task(f"right {chance:.0%}, {streams} streams", streams, chance),
            Task("no repeats", 1, temperature=1.0),
            Task(f"no repeats, {streams} streams", streams, temperature=1.0),
        ]
    if draft_model is not None:
        tasks += [
            Task("draft model", 1, temperature=1.0, with_model=True),
            Task(f"draft model, {streams} streams", streams, temperature=1.0, with_model=True),
        ]
    with console.status("loading"):
        stage = LoadedStage(
            model, load_format="auto" if trained else "dummy", threads=threads,
            max_requests=max(32, streams),
            kv_tokens=2 * max(32, streams) * (2 * _PROMPT + tokens),
            draft_model=None if draft_model is None else locate(draft_model),
            max_drafts=DEFAULT_MAX_DRAFTS,
        )  # fmt: skip
    config = SchedulerConfig(
        num_blocks=stage.kv_tokens // BLOCK_SIZE, block_size=BLOCK_SIZE,
        max_requests=max(32, streams), max_model_len=stage.info.max_model_len,
        max_step_tokens=stage.spec.max_step_tokens, prefix_cache=False, lookahead=False,
        drafter="none",  # of the plain runs
        num_saved_states=None if stage.description.mixer is None else 0, swap="never",
        cost_model=_measured(stage) if cost_model is None else read_cost_model(cost_model),
    )  # fmt: skip
    rates = []
    for task in tasks:
        with console.status(task.name):
            rates.append(measure(stage, task, config, "auto", tokens, repeats))
    resolved = {"drafter": "auto", "backend": stage.info.backend, "tokens": tokens}
    publish(make_report(context, {"results": [asdict(r) for r in rates]}, resolved), as_json, out)
    if not as_json:
        _print(model.name, rates)


def _measured(stage: LoadedStage) -> dict[str, Any]:
    """A cost model of this stage, without which `auto` makes no drafts."""
    model, _, _ = fit_cost_model(
        stage, stage.spec.model_path, "legato bench speculation",
        max_step_tokens=256, num_mixed=40, repeats=2,
    )  # fmt: skip
    return model.to_dict()


def _print(model: str, rates: Sequence[Rates]) -> None:
    columns = ("task", "tokens/s", "with drafts", "speed-up", "drafts right", "text")
    rows = [
        (
            r.task, f"{r.plain_tokens_per_s:.0f}", f"{r.drafted_tokens_per_s:.0f}",
            f"{r.speed_up:.2f}", f"{r.accepted} of {r.drafted}",
            "the same" if r.same_text else "differs",
        )
        for r in rates
    ]  # fmt: skip
    output.print(table(f"{model}: one stage, no transport", columns, rows, num_words=1))
