"""One rank of one pipeline stage: loads its part of the model and executes step plans.

A step is `execute`: apply the plan to the persistent batch, gather the step's batch, run the
layers once over all of it, and return hidden states or, on the last stage, tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from actors.scheduling.plan import StepPlan, StepResult, logit_rows
from actors.scheduling.request import Grammar
from actors.stage.adapters import StageAdapters
from actors.stage.cuda.captured_head import CapturedHead
from actors.stage.cuda.graph_draw import GraphDraw
from actors.stage.cuda.graphs import Capture, StepGraphs, StepOutput, capture_on_gpu
from actors.stage.cuda.run_ahead import Following, Launched, RunAhead
from actors.stage.draft_model import DraftModel
from actors.stage.drafts import Draws, asked, draws_of
from actors.stage.extra_outputs import with_prompts
from actors.stage.head import Head, Sampler
from actors.stage.host_batch import HostBatch
from actors.stage.input_batch import InputBatch
from actors.stage.kv import KVCache
from actors.stage.loaded_model import LoadedModel, load_model
from actors.stage.memory import available_bytes, step_bytes
from actors.stage.profile import DeviceMemory, GpuMemory, Room, ending, measure, plans_to_measure
from actors.stage.spec import StageInfo, StageSpec
from actors.stage.states import RecurrentStates, state_rows
from actors.stage.step_inputs import AdapterTiling
from actors.transport.group import RankGroup
from kernels.random_stream import DRAW_VERSION

_log = logging.getLogger(__name__)


class StageRunner:
    """Loaded once constructed: call `allocate`, then `execute` per step. Not thread-safe.

    Steps are idempotent: executing a plan again after a failure gives the same answer.
    info: what this rank reports of itself.
    """

    def __init__(self, spec: StageSpec, progress: Callable[[float], None] | None = None) -> None:
        """Read this rank's weights and join the stage's other ranks.

        progress is called with the fraction done, 0 to 1. Raises ModelError (a ValueError) naming
        the file where the folder cannot be served, BackendError where the backend cannot run here.
        """
        self.spec = spec
        self._is_first = spec.is_first
        self._device = torch.device(spec.device)
        self._group = RankGroup()
        self._head: Head | None = None
        self._sampler: Sampler | None = None
        self.kv: KVCache | None = None  # once allocated
        self._states: RecurrentStates | None = None  # if layers keep them
        self._graphs: StepGraphs | None = None
        self._ahead: RunAhead | None = None
        self._adapters: StageAdapters | None = None
        self._drafting: DraftModel | None = None
        self._applied_step: int | None = None
        self.info = self._load(spec, progress or (lambda fraction: None))

    def _load(self, spec: StageSpec, progress: Callable[[float], None]) -> StageInfo:
        model = load_model(spec, progress)
        self._model, self._config, self._backend = model, model.config, model.backend
        self._group, self._decoder = model.group, model.decoder
        if spec.max_adapters:
            self._adapters = StageAdapters(
                model.config, model.part, spec, model.dtype, self._device
            )
            for layer, adapters in zip(model.weights.layers, self._adapters.layers, strict=True):
                layer.adapters = adapters
            self._adapters.prepare(model.backend)
        sizes = (spec.max_requests, model.max_model_len, spec.block_size)
        filled = () if self._adapters is None else self._adapters.filled
        self._input_batch = InputBatch(*sizes, filled)
        if spec.is_last:
            self._head = self._make_head()
        if spec.draft_model_path is not None and self._sampler is not None:
            self._drafting = DraftModel(spec, model, self._input_batch, self._sampler, progress)
        self._backend.finish_loading()
        models: tuple[LoadedModel | DraftModel | None, ...] = (model, self._drafting)
        return StageInfo(
            hidden_size=model.config.hidden_size,
            vocab_size=model.config.vocab_size,
            max_model_len=model.max_model_len,
            dtype=str(model.dtype).removeprefix("torch."),
            backend=self._backend.name,
            kv_block_bytes=sum(one.kv_block_bytes for one in models if one),
            state_bytes=sum(one.state_bytes for one in models if one),
            **self._room(model.dtype)._asdict(),
            eos_token_ids=model.config.eos_token_ids,
            num_parameters=model.num_parameters,
            instruction_set=self._backend.instruction_set(self._device),
            draw_version=DRAW_VERSION,
            attention_window=model.config.attention_window,
        )

    def _room(self, dtype: torch.dtype) -> Room:
        """Memory for the KV cache: measured on a GPU, computed where memory is the machine's."""
        if self._device.type == "cuda":
            graphs = capture_on_gpu() if self.spec.cuda_graphs else None
            return self.profile(GpuMemory(), graphs)
        spare_bytes = 0 if self._drafting is None else self._drafting.spare_bytes
        taken_bytes = step_bytes(self.spec, self._config, dtype) + spare_bytes
        return Room(max(0, available_bytes(self._device) - taken_bytes))

    def profile(self, memory: DeviceMemory, capture: Capture | None) -> Room:
        """Memory that the KV cache may take (see `actors.stage.profile`), found over one of a
        single block, after which there is none. capture: None where no graphs will be."""
        self._make_cache(1, 0, self.spec.max_requests)
        room = measure(memory, self._largest_step, lambda: capture and self.capture(capture))
        if self._states is not None:
            room = room.without(self._states.free())
        self.kv = self._states = self._graphs = self._ahead = self._applied_step = None
        return room

    def _largest_step(self) -> None:
        for plan in plans_to_measure(self.spec, self._input_batch.max_model_len):
            num_tokens = plan.num_tokens
            hidden_TH = None if self._is_first else self._decoder.empty_hidden(num_tokens).zero_()
            self.execute(plan, hidden_TH)
            self.execute(ending(plan), None)

    def allocate(self, num_blocks: int, num_host_blocks: int = 0, num_requests: int = 0) -> None:
        """Make the KV cache, and states of num_requests (0: the spec's) if layers keep them;
        `execute` works from here on."""
        self._make_cache(num_blocks, num_host_blocks, num_requests or self.spec.max_requests)
        if self._device.type == "cuda" and self.spec.cuda_graphs:
            self.capture(capture_on_gpu())

    def wait_for_memory(self, limit_s: float) -> None:
        """See `Backend.wait_for_memory`."""
        if self.kv is not None:
            self.kv.wait_for_memory(limit_s)

    def _make_cache(self, num_blocks: int, num_host_blocks: int, num_requests: int) -> None:
        if self._device.type == "cuda":
            self._input_batch.tables_on(self._device)
        self.kv, self._states = self._model.make_cache(num_blocks, num_host_blocks, num_requests)
        if self._drafting is not None:
            self._drafting.allocate(num_blocks, num_requests)
            self.kv.on_write = self._drafting.forget

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Capture the forward pass at its usual sizes; `allocate` does so on a GPU."""
        support = self._backend.graph_support()
        if support is None:
            _log.info("backend %s cannot be captured: no CUDA graphs", self._backend.name)
            return
        mixtures = [w.experts for w in self._model.weights.layers if w.experts is not None]
        if not all(map(support.holds_experts, mixtures)):
            _log.info("what is launched for these experts depends on the tokens: no CUDA graphs")
            return
        spec, batch, draw = self.spec, self._input_batch, None
        if spec.is_last:
            num_rows = batch.tables_on(self._device).num_rows
            most = logit_rows(spec.max_requests)
            draw = GraphDraw(self._decoder, self._group, support, most, num_rows)
        max_hybrid_tokens = min(spec.graph_tokens, spec.max_step_tokens) if support.hybrid else 0
        graphs = StepGraphs(
            self._decoder, batch, spec.max_requests, max_hybrid_tokens, spec.is_first, draw,
            AdapterTiling(spec.max_adapters, support.adapter_rows), self._states is not None,
        )  # fmt: skip
        graphs.capture(capture)
        self._graphs = graphs
        if draw is not None:
            head = CapturedHead(draw, batch, self._sampler)
            self._ahead = RunAhead(graphs, batch, head, self._states)

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, hidden_TH: torch.Tensor | None, following: Following | None = None
    ) -> torch.Tensor | StepResult | None:
        """Run one micro-batch.

        hidden_TH: None on the first stage, else what the stage before returned (not modified).
        following: asked while the GPU computes for the plan to be executed next, which a captured
        single stage launches without waiting for this step's tokens; None if there is none ever.
        Every rank is given the same plans in the same order. Returns hidden states (T, H) with the
        residual added on all stages but the last; there rank 0 returns the StepResult, without
        stage times, and the other ranks None.
        """
        if self._adapters is None:
            return self._execute(plan, hidden_TH, following)
        with self._adapters.pace.step(plan.adapter_load_s):
            return self._execute(plan, hidden_TH, following)

    def _execute(
        self, plan: StepPlan, hidden_TH: torch.Tensor | None, following: Following | None
    ) -> torch.Tensor | StepResult | None:
        launched = None if self._ahead is None else self._ahead.pop(plan.step_id)
        if launched is None:
            self._apply(plan)
            if not plan.slices:
                return self._empty(plan)
            launched = self._launch(plan, hidden_TH)
        host, output = launched.host, launched.output
        if self._head is None:
            return (output.residual_TH + output.x_TH)[: host.num_tokens]
        if self._ahead is not None and output.tokens_S is not None:
            prompts, pooled = self._head.prompt_outputs(plan, host, output)
            result = self._ahead.finish(plan, launched, following, self._apply)
            if result is not None and (prompts or pooled):
                result = with_prompts(result, prompts, pooled)
        else:
            result = self._head.finish(plan, host, output)
        return self._offer(plan, result) if plan.drafts_asked and result else result

    def _offer(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result with the drafts that the step asks for: what a grammar forces, else what the
        draft model guesses."""
        assert self._sampler is not None
        begin_s, wanted, pass_s = time.monotonic(), asked(plan, result), 0.0
        drafts: dict[int, Sequence[int]] = {}
        try:
            drafts.update(self._sampler.forced(wanted))
            if self._drafting is not None:
                rest = [one for one in wanted if one.request_id not in drafts]
                guessed, pass_s = self._drafting.offer(plan.step_id, rest)
                drafts.update(guessed)
        except Exception:  # of any type: drafts are optional, and the step's tokens stand
            _log.exception("step %d brings no drafts", plan.step_id)
            drafts = {}
        return replace(
            result,
            drafts_offered=tuple((i, tuple(drafts[i])) for i, *_ in wanted if drafts.get(i)),
            drafting_s=time.monotonic() - begin_s,
            draft_pass_s=pass_s,
        )

    def _launch(self, plan: StepPlan, hidden_TH: torch.Tensor | None) -> Launched:
        host = self._input_batch.gather(plan.slices)
        if self._states is not None:
            self._states.note(plan, host)
        if self._drafting is not None:
            self._drafting.note(plan, host)
        if not self._is_first and (hidden_TH is None or len(hidden_TH) != host.num_tokens):
            given = "none" if hidden_TH is None else str(len(hidden_TH))
            raise ValueError(f"{host.num_tokens} rows of hidden states expected, {given} given")
        draws = None if self._head is None else draws_of(plan, host)
        return Launched(plan.step_id, host, draws, self._forward(host, hidden_TH, draws))

    def _forward(
        self, host: HostBatch, hidden_TH: torch.Tensor | None, draws: Draws | None
    ) -> StepOutput:
        if self._graphs and (output := self._graphs.run(host, hidden_TH, draws)):
            return output
        batch, tokens_T = self._input_batch.to_device(host, self._device)
        if host.states is not None:
            batch.states = state_rows(host.states, batch)
        if hidden_TH is None:
            x_TH = self._decoder.embed(tokens_T, batch.positions_T)
        else:
            x_TH = hidden_TH.to(self._device, copy=True)
        return StepOutput(*self._decoder.layers(x_TH, batch))

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar before its request runs, on rank 0 of the last stage.

        Raises ValueError for a text that is not a grammar of its kind.
        """
        if self._sampler is not None:
            self._sampler.grammars.compile(grammar)

    def load_adapter(self, slot: int, folder: Path) -> None:
        """`StageAdapters.load`, called beside steps in another thread."""
        if self._adapters is not None:
            self._adapters.load(slot, folder)

    def close(self) -> None:
        """Leave the rank group and drop the cache."""
        # Graphs first: NCCL does not end a communicator before the graphs that use it.
        self.kv = self._states = self._graphs = self._ahead = None
        self._group.close()

    def _apply(self, plan: StepPlan) -> None:
        """Bring the persistent batch and the cache to the plan's step, once: a repeated step finds
        it done (its first attempt may have overwritten what a swap would read)."""
        if self.kv is None:
            raise RuntimeError("allocate the KV cache before executing a step")
        if plan.step_id == self._applied_step:
            return
        if plan.swap_out or plan.swap_in or plan.copies:
            self.kv.transfer(plan)
        self._input_batch.apply(plan)
        if self._head is not None and (plan.released or plan.started):
            self._head.release([*plan.released, *(s.request_id for s in plan.started)])
        self._applied_step = plan.step_id

    def _empty(self, plan: StepPlan) -> torch.Tensor | StepResult | None:
        if self._head is None:
            return self._decoder.empty_hidden()
        return StepResult(plan.step_id, ()) if self.spec.rank == 0 else None

    def _make_head(self) -> Head:
        config, spec = self._config, self.spec
        if spec.rank == 0:
            folder, end = Path(spec.model_path), config.eos_token_ids
            self._sampler = Sampler(
                self._input_batch, self._backend, folder, config.vocab_size, end
            )
        return Head(
            self._decoder, self._input_batch, self._sampler, self._backend, self._group,
            share_tokens=spec.is_first,
        )  # fmt: skip
