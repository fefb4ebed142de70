"""Frames arrive whole, in order, and an ended connection says so."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.wire import ConnectionLost, FrameProtocol, Mailbox, Sender, connect, private_directory


@pytest.fixture
def directory() -> Iterator[Path]:
    path = private_directory()
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_directory_is_private(directory: Path) -> None:
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("size", [0, 1, 5000, 3_000_000])
def test_frame_of_any_size_arrives_whole(directory: Path, size: int) -> None:
    mailbox = Mailbox(directory / "m")
    sender = Sender(directory / "m")
    payload = bytes(i % 251 for i in range(size))
    thread = threading.Thread(target=lambda: (sender.send(payload), sender.send(b"after")))
    thread.start()
    assert mailbox.receive() == payload
    assert mailbox.receive() == b"after"
    thread.join()
    assert not (directory / "m").exists(), "the socket is unlinked once connected"
    sender.close()
    with pytest.raises(ConnectionLost):
        mailbox.receive()
    mailbox.close()


def test_a_peek_neither_waits_nor_takes(directory: Path) -> None:
    mailbox = Mailbox(directory / "m")
    assert mailbox.peek() is None  # nobody has connected
    sender = Sender(directory / "m")
    sender.send(b"one")
    sender.send(b"two")
    assert mailbox.receive() == b"one"
    assert mailbox.peek() == mailbox.peek() == b"two"
    assert mailbox.receive() == b"two"
    assert mailbox.peek() is None
    sender.close()
    assert mailbox.peek() is None
    with pytest.raises(ConnectionLost):
        mailbox.receive()
    mailbox.close()


async def test_event_loop_end_reassembles_split_frames(directory: Path) -> None:
    frames: list[bytes] = []
    lost = asyncio.Event()
    protocol = FrameProtocol(frames.append, lost.set)
    stream = b"".join(len(p).to_bytes(4, "little") + p for p in (b"a", b"", b"long" * 100))
    for i in range(0, len(stream), 7):
        protocol.data_received(stream[i : i + 7])
    assert frames == [b"a", b"", b"long" * 100]


async def test_loop_to_mailbox_and_loss(directory: Path) -> None:
    mailbox = Mailbox(directory / "m")
    lost = asyncio.Event()
    protocol = await connect(directory / "m", lambda _: None, lost.set)
    protocol.send(b"plan")
    assert await asyncio.to_thread(mailbox.receive) == b"plan"
    mailbox.close()
    await asyncio.wait_for(lost.wait(), 5)
    protocol.send(b"to nobody")  # dropped: the owner has been told
