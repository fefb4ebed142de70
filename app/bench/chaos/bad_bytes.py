"""Malformed HTTP to send to a socket: broken heads, lengths and chunks."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_BODY = b'{"model": "x", "prompt": "a", "max_tokens": 1}'
_GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class BadBytes:
    """Bytes to send. is_whole: the server owes an answer or a closed connection; otherwise the
    client disconnects."""

    kind: str
    content: bytes
    is_whole: bool = True


def bad_bytes(seed: int) -> Iterator[BadBytes]:
    """An endless stream, determined by the seed."""
    chance = random.Random(seed)
    makers: list[Callable[[random.Random], BadBytes]] = [
        _noise, _foreign, _request_line, _length, _chunks, _header, _large_head, _unfinished,
        _pipelined, _flipped,
    ]  # fmt: skip
    while True:
        yield chance.choice(makers)(chance)


def _noise(chance: random.Random) -> BadBytes:
    content = chance.randbytes(chance.randint(1, 2000))
    return BadBytes("noise", content + b"\r\n\r\n", is_whole=False)


def _foreign(chance: random.Random) -> BadBytes:
    """Opening bytes of other protocols."""
    content = chance.choice(
        [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),
            pickle.dumps({"a": [1, 2, 3]}),
            b"SSH-2.0-OpenSSH_9.0\r\n",
            b"*1\r\n$4\r\nPING\r\n",
            b"HELO there\r\n",
            b"\x00\x00\x00\x08\x04\xd2\x16\x2f",
        ]
    )
    return BadBytes("foreign", content, is_whole=False)


def _request_line(chance: random.Random) -> BadBytes:
    line = chance.choice(
        [
            b"GET", b"GET /", b"GET / HTTP/9.9", b"GET  /  HTTP/1.1", b"get /live HTTP/1.1",
            b"GET /live HTTP/1.1 extra", b"\x00 / HTTP/1.1", b"GET \x00 HTTP/1.1",
            b"GET /\xff HTTP/1.1", b"GET http://other/live HTTP/1.1", b"CONNECT a:1 HTTP/1.1",
            b"GET /" + b"a" * 9000 + b" HTTP/1.1", b"OPTIONS * HTTP/1.1",
            b"GET /../../etc/passwd HTTP/1.1", b"GET /v1/models/%2e%2e HTTP/1.1",
            b"FOO" * 50 + b" / HTTP/1.1", b"HTTP/1.1 200 OK",
        ]
    )  # fmt: skip
    return BadBytes(
        "request line", line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n", False
    )


def _length(chance: random.Random) -> BadBytes:
    length = chance.choice(
        [
            b"-1",
            b"abc",
            b"",
            b"1e3",
            b"0x10",
            b"9" * 30,
            b"1073741824",
            b"+5",
            b"5, 5",
            b" ",
            b"1\x00",
        ]
    )
    head = _POST + b"Content-Length: " + length + b"\r\n"
    if chance.random() < 0.3:
        head += b"Content-Length: 3\r\n"
    return BadBytes("length", head + b"Connection: close\r\n\r\n" + _BODY, is_whole=False)


def _chunks(chance: random.Random) -> BadBytes:
    chunk = chance.choice(
        [
            b"zz\r\nabc\r\n", b"-1\r\n", b"ffffffffffffffff\r\nabc", b"3\r\nabcdef\r\n0\r\n\r\n",
            b"0\r\n" + b"a: b\r\n" * 500 + b"\r\n", b"5;" + b"x" * 5000 + b"\r\nabcde\r\n0\r\n\r\n",
            b"%x\r\n" % len(_BODY) + _BODY + b"\r\n0\r\n\r\n", b"\r\n",
            b"1\r\na\r\n" * 300 + b"0\r\n\r\n",
        ]
    )  # fmt: skip
    head = _POST + b"Transfer-Encoding: chunked\r\n"
    if chance.random() < 0.3:
        head += b"Content-Length: 4\r\n"
    if chance.random() < 0.2:
        head = head.replace(b"chunked", b"gzip, chunked, identity")
    return BadBytes("chunks", head + b"\r\n" + chunk, is_whole=False)


def _header(chance: random.Random) -> BadBytes:
    header = chance.choice(
        [
            b"no colon", b": empty", b"a b: c", b"a\x00b: c", b"a: b\x00c", b" folded: a",
            b"a: b\r\n  c", b"Host: other", b"Host:", b"Host: [", b"Host: \xff\xfe",
            b"X-Request-Id: " + b"\x7f" * 50, b"Authorization: Bearer \xff",
            b"Expect: 100-continue", b"Expect: nonsense", b"Upgrade: h2c",
            b"Connection: Upgrade\r\nUpgrade: websocket", b"Origin: null", b"Origin: \xff",
            b"Content-Encoding: gzip", b"Range: bytes=0-0,-1", b"Cookie: " + b"a=b;" * 500,
        ]
    )  # fmt: skip
    content = _GET + header + b"\r\nConnection: close\r\n\r\n"
    return BadBytes("header", content, is_whole=False)


def _large_head(chance: random.Random) -> BadBytes:
    size = chance.choice([20_000, 100_000, 1 << 20])
    many = b"".join(b"X-%d: y\r\n" % n for n in range(chance.choice([150, 3000])))
    content = chance.choice([_GET + many, _GET + b"X: " + b"y" * size + b"\r\n"])
    return BadBytes("large head", content + b"Connection: close\r\n\r\n")


def _unfinished(chance: random.Random) -> BadBytes:
    whole = _POST + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY
    return BadBytes("unfinished", whole[: chance.randrange(1, len(whole))], is_whole=False)


def _pipelined(chance: random.Random) -> BadBytes:
    """Valid requests in sequence: every one is answered."""
    count = chance.randint(2, 30)
    return BadBytes("pipelined", (_GET + b"\r\n") * count + _GET + b"Connection: close\r\n\r\n")


def _flipped(chance: random.Random) -> BadBytes:
    whole = bytearray(_POST + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY)
    for _ in range(chance.randint(1, 5)):
        whole[chance.randrange(len(whole))] = chance.randrange(256)
    return BadBytes("flipped", bytes(whole), is_whole=False)
