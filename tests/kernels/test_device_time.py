"""Device times are those of a graph of many launches, on inputs in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.device_time import graph_time_s


class Device:
    """torch.cuda as far as it is used: a graph remembers what was launched in it, and a launch
    takes a millisecond when the graph runs."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.launched: list[str] = []
        self.captured: list[str] = []
        self.is_capturing = False

    def launch(self, name: str) -> None:
        (self.captured if self.is_capturing else self.launched).append(name)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Stream:
            def wait_stream(self, other: object) -> None: ...

        class Using:
            def __init__(self, stream: object) -> None: ...

            def __enter__(self) -> None: ...

            def __exit__(self, *error: object) -> None: ...

        class Capturing:
            def __init__(self, graph: object, stream: object, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"

            def __enter__(self) -> None:
                device.is_capturing = True

            def __exit__(self, *error: object) -> None:
                device.is_capturing = False

        class Graph:
            def replay(self) -> None:
                device.now_ms += len(device.captured)

        class Event:
            def __init__(self, enable_timing: bool) -> None: ...

            def record(self) -> None:
                self.at_ms = device.now_ms

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Any) -> float:
                return float(end.at_ms - self.at_ms)

        fakes = {
            "Stream": Stream, "current_stream": Stream, "stream": Using, "graph": Capturing,
            "CUDAGraph": Graph, "Event": Event,
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_a_graph_is_timed_whose_launches_take_their_inputs_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    device.install(monkeypatch)
    works = [lambda name=name: device.launch(name) for name in ("a", "b", "c")]  # type: ignore[misc]
    assert graph_time_s(works) == pytest.approx(1e-3)
    assert device.launched == ["a", "b", "c"]  # once, to compile
    assert device.captured == ["a", "b", "c"] * (len(device.captured) // 3)
    assert len(device.captured) >= 30
