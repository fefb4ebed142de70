"""Reads `multipart/form-data` (RFC 7578) as it arrives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from enum import Enum, auto
from typing import Final

from app.api.http.errors import ApiError, invalid

_MAX_HEAD_BYTES: Final = 8 << 10  # of one part
_MAX_BOUNDARY_CHARS: Final = 70  # RFC 2046


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A field of the form. filename: None if it is no file."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    """Content of the field that began last."""

    data: bytes


class _State(Enum):
    DATA = auto()
    BOUNDARY = auto()  # behind one: more parts, or the end
    HEAD = auto()
    END = auto()


def boundary_of(content_type: bytes | None) -> bytes:
    """The boundary of a form; raises 415 if the body is none, 400 if it names none."""
    message = Message()
    message["content-type"] = (content_type or b"").decode("latin-1")
    if message.get_content_type() != "multipart/form-data":
        raise ApiError(415, "The body must be a form: send 'multipart/form-data'.")
    try:
        boundary = message.get_boundary("")
    except ValueError:  # of a charset that is none, or knows no such bytes
        boundary = ""
    if not 0 < len(boundary) <= _MAX_BOUNDARY_CHARS or not boundary.isascii():
        raise invalid("The Content-Type names no valid boundary.", code="invalid_form")
    return boundary.encode()


class FormReader:
    """Splits a form into its fields. Keeps little more than the part of the body that came last."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._held = b"\r\n"  # so that the first boundary is like the others
        self._state = _State.DATA
        self._is_preamble = True

    @property
    def is_complete(self) -> bool:
        """Whether the last boundary has come."""
        return self._state is _State.END

    def feed(self, body: bytes) -> Iterator[PartBegin | PartData]:
        """What a further part of the body holds; raises 400."""
        self._held += body
        while True:
            if self._state is _State.DATA:
                at = self._held.find(self._delimiter)
                end = at if at >= 0 else max(0, len(self._held) - len(self._delimiter) + 1)
                if end and not self._is_preamble:
                    yield PartData(self._held[:end])
                self._held = self._held[end:]
                if at < 0:
                    return
                self._held = self._held[len(self._delimiter) :]
                self._state = _State.BOUNDARY
            elif self._state is _State.BOUNDARY:
                if len(self._held) < 2:
                    return
                if self._held[:2] == b"--":
                    self._state = _State.END
                elif self._held[:2] == b"\r\n":
                    self._state = _State.HEAD  # the line's end stays, in case there are no headers
                else:
                    raise _malformed("a boundary is not followed by the end of a line")
            elif self._state is _State.HEAD:
                end = self._held.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES)
                if end < 0:
                    if len(self._held) >= _MAX_HEAD_BYTES:
                        raise _malformed("the headers of a field are too long")
                    return
                yield _begin(self._held[2:end])
                self._held = self._held[end + 4 :]
                self._state, self._is_preamble = _State.DATA, False
            else:
                self._held = b""  # an epilogue is ignored
                return


def _begin(head: bytes) -> PartBegin:
    """A field from its headers."""
    try:
        headers = HeaderParser().parsestr(head.decode())
    except UnicodeDecodeError:
        raise _malformed("the headers of a field are not UTF-8") from None
    name = headers.get_param("name", header="content-disposition")
    try:
        filename = headers.get_filename()
    except ValueError:
        raise _malformed("a file's name is not in the charset that it names") from None
    if headers.get_content_disposition() != "form-data" or not isinstance(name, str) or not name:
        raise _malformed("a field has no name")
    return PartBegin(name, filename)


def _malformed(reason: str) -> ApiError:
    return invalid(f"The body is not a readable form: {reason}.", code="invalid_form")
