"""Frames arrive whole, in order, and an ended connection says so."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop

from actors.transport.addresses import new_local_address, new_secret, private_directory
from actors.transport.wire import (
    MAX_FRAME_BYTES,
    ConnectionLost,
    FrameProtocol,
    Mailbox,
    Sender,
    connect,
    listen,
)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = private_directory()
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_directory_is_private(directory: Path) -> None:
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("size", [0, 1, 5000, 3_000_000])
def test_frame_of_any_size_arrives_whole(directory: Path, size: int) -> None:
    mailbox = Mailbox(str(directory / "m"))
    sender = Sender(str(directory / "m"))
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
    mailbox = Mailbox(str(directory / "m"))
    assert mailbox.peek() is None  # nothing has connected
    sender = Sender(str(directory / "m"))
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


TOO_LONG = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")


async def test_a_peer_that_sends_much_leaves_others_their_turn(directory: Path) -> None:
    """Frames that have come together are handled some at a time, all of them and in order."""
    received: list[bytes] = []
    turns: list[int] = []  # frames handled, seen once a turn of the loop
    lost = asyncio.Event()
    server, path = await listen(
        str(directory / "s"), lambda: FrameProtocol(received.append, lost.set)
    )
    sent = [bytes([number % 256]) * (5000 if number % 3 else 70_000) for number in range(100)]
    peer = Sender(path)
    writer = threading.Thread(target=lambda: [peer.send(frame) for frame in sent])
    writer.start()
    async with asyncio.timeout(20):
        while len(received) < len(sent):
            turns.append(len(received))
            await asyncio.sleep(0)
    writer.join()
    assert received == sent
    assert max(b - a for a, b in pairwise(turns)) <= 8
    peer.close()
    await asyncio.wait_for(lost.wait(), 10)
    server.close()


async def test_a_frame_that_cannot_be_dealt_with_ends_the_connection(directory: Path) -> None:
    """Behind a rest as well, and no frame is handed over twice."""
    received: list[bytes] = []
    lost = asyncio.Event()

    def handle(frame: bytes) -> None:
        received.append(frame)
        if frame == b"bad":
            raise ValueError(frame)

    server, path = await listen(str(directory / "s"), lambda: FrameProtocol(handle, lost.set))
    peer = Sender(path)
    for frame in (b"x" * 40_000, b"one", b"bad", b"never"):
        peer.send(frame)
    await asyncio.wait_for(lost.wait(), 10)
    assert received[1:] == [b"one", b"bad"]
    peer.close()
    server.close()


def test_a_mailbox_gives_up_on_a_length_that_no_frame_has(directory: Path) -> None:
    mailbox = Mailbox(str(directory / "m"))
    with socket.socket(socket.AF_UNIX) as intruder:
        intruder.connect(str(directory / "m"))
        intruder.sendall(TOO_LONG)
        with pytest.raises(ConnectionLost, match=str(MAX_FRAME_BYTES + 1)):
            mailbox.receive()
    mailbox.close()


async def test_the_event_loop_hangs_up_on_a_length_that_no_frame_has(directory: Path) -> None:
    frames, lost = list[bytes](), asyncio.Event()
    server, address = await listen(
        str(directory / "m"), lambda: FrameProtocol(frames.append, lost.set)
    )
    reader, writer = await asyncio.open_unix_connection(address)
    writer.write(b"\x02\x00\x00\x00ok" + TOO_LONG)
    assert await asyncio.wait_for(reader.read(), 5) == b""  # the connection is closed
    await asyncio.wait_for(lost.wait(), 5)
    assert frames == [b"ok"]
    writer.close()
    server.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("address", ["path", "127.0.0.1:0"])
def test_an_abort_does_not_wait_for_a_peer_that_never_reads(
    directory: Path, address: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    secret = new_secret()
    mailbox = Mailbox(str(directory / "m") if address == "path" else address, secret)

    async def fill_and_abort() -> None:
        lost = asyncio.Event()
        protocol = await connect(mailbox.address, lambda _: None, lost.set, secret)
        for _ in range(64):  # more than the system's buffers hold
            protocol.send(b"x" * (1 << 20))
        assert protocol.num_unsent_bytes > 1 << 20
        protocol.abort()
        await asyncio.wait_for(lost.wait(), 10)
        protocol.send(b"dropped")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(fill_and_abort())
    mailbox.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="no such option here")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("address", ["path", "local", "127.0.0.1:0"])
def test_only_a_connection_between_nodes_ends_where_nothing_is_read(
    directory: Path,
    address: str,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And only at the end that asks for it: a process that stands still may go on later."""
    secret = b"" if address == "path" else new_secret()
    where = {"path": str(directory / "m"), "local": new_local_address()}.get(address, address)
    accepted: list[FrameProtocol] = []

    def accept() -> FrameProtocol:
        accepted.append(FrameProtocol(lambda _: heard.set(), lambda: None, secret, 20.0))
        return accepted[0]

    async def limits_ms() -> list[int]:
        server, there = await listen(where, accept)
        made = await connect(there, lambda _: None, lambda: None, secret)
        made.send(b"it has been accepted")
        await asyncio.wait_for(heard.wait(), 10)
        found = list[int]()
        for end in (made, *accepted):
            assert end._transport is not None
            sock = end._transport.get_extra_info("socket")
            if sock.family != socket.AF_UNIX:
                found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        made.close()
        server.close()
        return found

    with asyncio.Runner(loop_factory=new_loop) as runner:
        heard = asyncio.Event()
        assert runner.run(limits_ms()) == ([0, 20_000] if address == "127.0.0.1:0" else [])
    assert not caplog.text  # e.g. that a socket has no such option


async def test_loop_to_mailbox_and_loss(directory: Path) -> None:
    mailbox = Mailbox(str(directory / "m"))
    lost = asyncio.Event()
    protocol = await connect(str(directory / "m"), lambda _: None, lost.set)
    protocol.send(b"plan")
    assert await asyncio.to_thread(mailbox.receive) == b"plan"
    mailbox.close()
    await asyncio.wait_for(lost.wait(), 5)
    protocol.send(b"to no receiver")  # dropped: the owner has been told


def test_between_nodes_only_the_secret_opens_a_mailbox() -> None:
    secret = new_secret()
    mailbox = Mailbox("127.0.0.1:0", secret)
    assert not mailbox.address.endswith(":0")
    intruders = [Sender(mailbox.address, said) for said in (new_secret(), b"")]
    intruders[1].close()
    friend = Sender(mailbox.address, secret)
    friend.send(b"plan")
    assert mailbox.receive() == b"plan"
    friend.close()
    intruders[0].close()
    with pytest.raises(ConnectionLost):
        mailbox.receive()
    mailbox.close()


async def test_the_event_loop_cuts_intruders_off_and_goes_on_listening() -> None:
    secret, frames = new_secret(), list[bytes]()
    lost, heard = asyncio.Event(), asyncio.Event()

    def note(frame: bytes) -> None:
        frames.append(frame)
        heard.set()

    server, address = await listen("127.0.0.1:0", lambda: FrameProtocol(note, lost.set, secret))
    cut_off = asyncio.Event()
    intruder = await connect(address, lambda _: None, cut_off.set, new_secret())
    intruder.send(b"a plan of mine")
    await asyncio.wait_for(cut_off.wait(), 5)
    assert not lost.is_set()
    friend = await connect(address, lambda _: None, lambda: None, secret)
    friend.send(b"answer")
    await asyncio.wait_for(heard.wait(), 5)
    assert frames == [b"answer"]
    friend.close()
    await asyncio.wait_for(lost.wait(), 5)
    server.close()
