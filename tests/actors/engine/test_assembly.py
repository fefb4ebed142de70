"""How an engine ends, in a process that its fronts see from outside."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import uvloop

from actors.engine.assembly import Engine
from actors.engine.config import EngineConfig, KVMemory
from actors.engine.peers import FrontAddress, Peers
from actors.scheduling.events import DeliveryTook
from actors.stage.spec import StageSpec
from actors.transport.addresses import new_local_address, new_secret
from actors.transport.messages import Hello, Welcome, pack_kind
from tests.actors.scheduling.short_lives import config

WITHIN_S = 5.0  # of the eight that the engine waits for its stages


def frame(message: Any) -> bytes:
    packed = pack_kind(message)
    return len(packed).to_bytes(4, "little") + packed


def test_an_engine_hangs_up_on_fronts_before_it_waits_for_its_stages(tmp_path: Path) -> None:
    """They need not find out by its silence that their streams have to move."""
    shares = KVMemory(shared_cache_gib=1.0, shared_cache_path=str(tmp_path))
    engine = Engine(EngineConfig(StageSpec("none"), config(), kv=shares), [])
    fronts = FrontAddress("e", new_local_address(), None, new_secret())
    listens = threading.Event()

    async def serve() -> None:
        core: Any = None
        loop: Any = SimpleNamespace(peers=Peers(lambda *_: engine._end(loop, core), lambda _: None))
        await loop.peers.listen(fronts, lambda number: Welcome(number, time.monotonic(), 9, (), 9))
        listens.set()
        await engine.finished()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    scheduler = threading.Thread(target=run)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stage:
        engine._stages.here = [psutil.Process(stage.pid)]
        scheduler.start()
        try:
            assert listens.wait(WITHIN_S)
            with socket.socket(socket.AF_UNIX) as front:
                front.settimeout(WITHIN_S)
                front.connect(f"\0{fronts.local[1:]}")
                front.sendall(fronts.secret + frame(Hello(time.monotonic())))
                assert front.recv(1 << 16)  # it is welcome
                front.sendall(frame(DeliveryTook(0.1)))  # as if the replica had gone now
                while front.recv(1 << 16):
                    pass
            assert stage.poll() is None
            assert scheduler.is_alive()
        finally:
            stage.kill()
            scheduler.join()
