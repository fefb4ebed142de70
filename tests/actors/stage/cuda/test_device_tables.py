"""Block tables on the device equal the host's, whatever changed them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from actors.scheduling.plan import RequestStart, Slice, StepPlan
from actors.scheduling.request import SamplingParams
from actors.stage.cuda import device_tables
from actors.stage.cuda.device_tables import DeviceTables
from actors.stage.input_batch import InputBatch
from actors.stage.step_inputs import AdapterTiling, GraphSize, StepInputs

CPU = torch.device("cpu")
BLOCK, MAX_LEN, ROWS = 4, 64, 4
SIZE = GraphSize(ROWS, ROWS, ROWS, decodes=True)


def start(request_id: int, blocks: tuple[int, ...]) -> RequestStart:
    n = len(blocks) * BLOCK
    return RequestStart(request_id, (1,) * n, n, blocks, SamplingParams(max_tokens=9))


def in_use(batch: InputBatch, tables_SB: torch.Tensor, ids: list[int]) -> None:
    """Every entry in use is the host's."""
    for table_B, request_id in zip(tables_SB, ids, strict=True):
        row = batch.row(request_id)
        count = batch.columns.num_blocks_R[row]
        assert table_B[:count].tolist() == batch.block_tables_RB[row, :count].tolist()


@pytest.mark.parametrize("captured", [True, False])
def test_they_follow_starts_growth_trims_and_releases(captured: bool) -> None:
    rng, batch = random.Random(3), InputBatch(ROWS, MAX_LEN, BLOCK)
    tables = batch.tables_on(CPU)
    inputs = StepInputs(SIZE, AdapterTiling(0, 16), tables, CPU)
    inputs.clear()
    counts: dict[int, int] = {}
    for step in range(200):
        released = tuple(i for i in counts if rng.random() < 0.1)
        for i in released:
            del counts[i]
        started, grown, trimmed = [], [], []
        for i, count in counts.items():
            keep = count
            if count > 1 and rng.random() < 0.3:
                keep = count - 1
                trimmed.append((i, keep))
            if rng.random() < 0.5 and keep < MAX_LEN // BLOCK:
                grown.append((i, (rng.randrange(1, 99),)))
                keep += 1
            elif keep < count:
                trimmed.pop()
                keep = count
            counts[i] = keep
        while len(counts) < ROWS:
            counts[step * 10 + len(counts)] = count = rng.randrange(1, MAX_LEN // BLOCK)
            started.append(start([*counts][-1], tuple(rng.choices(range(1, 99), k=count))))
        slices = tuple(Slice(i, count * BLOCK - 1, 1, True) for i, count in counts.items())
        plan = StepPlan(
            step, slices, released=released, started=tuple(started), new_blocks=tuple(grown),
            trimmed=tuple(trimmed),
        )  # fmt: skip
        batch.apply(plan)
        if rng.random() < 0.3:
            batch.apply(plan)  # a step that failed is applied again
        host = batch.gather(slices)
        if captured:
            inputs.fill(SIZE, host, batch.block_tables_RB, None, None, nowhere=ROWS)
            if rng.random() < 0.2:  # a step that failed before it was queued
                inputs.fill(SIZE, host, batch.block_tables_RB, None, None, nowhere=ROWS)
            inputs.place_tables(ROWS)
            inputs.settle()
            placed = inputs.batch(SIZE, MAX_LEN).block_tables_SB
        else:
            placed = batch.to_device(host, CPU)[0].block_tables_SB
        in_use(batch, placed, [*counts])


def test_many_changes_at_once_go_ahead_of_the_graph() -> None:
    host = np.zeros((2, 16), np.int32)
    tables = DeviceTables(host, CPU)
    host[1, :10] = range(5, 15)
    tables.note(1, 0, 10)
    at, blocks = tables.changes(host, 4)
    assert at.tolist() == [16, 17, 18, 19]
    assert blocks.tolist() == [5, 6, 7, 8]
    assert tables.block_tables_RB[1].tolist()[4:10] == [9, 10, 11, 12, 13, 14]
    assert tables.changes(host, 4)[0].tolist() == at.tolist(), "they are not yet written"
    tables.settle()
    assert tables.changes(host, 4)[0].size == 0


def test_changes_whose_transfer_failed_are_brought_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = np.zeros((2, 16), np.int32)
    tables = DeviceTables(host, CPU)
    host[1, :3] = (5, 6, 7)
    tables.note(1, 0, 3)
    rows_S = torch.tensor([1])

    def fail(*arguments: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(device_tables, "upload", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            tables.leveled(host, rows_S, 4)
    host[1, 3] = 8
    tables.note(1, 3, 4)
    assert tables.leveled(host, rows_S, 4).tolist() == [[5, 6, 7, 8]]


def test_rows_that_came_later_are_carried_by_each_step() -> None:
    batch = InputBatch(1, MAX_LEN, BLOCK)
    batch.tables_on(CPU)
    batch.apply(StepPlan(0, (), started=(start(7, (3,)), start(8, (5, 6)))))
    host = batch.gather((Slice(7, 3, 1, True), Slice(8, 7, 1, True)))
    in_use(batch, batch.to_device(host, CPU)[0].block_tables_SB, [7, 8])
