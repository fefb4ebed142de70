"""Forms, cut anywhere, and forms that are none."""

from __future__ import annotations

import httpx
import pytest

from app.api.http.errors import ApiError
from app.api.http.multipart import FormReader, PartBegin, boundary_of

CONTENT = b"a\r\n--\r\n\r\n--bound\r-\n" * 3  # nearly a boundary


def form(boundary: str = "bound-1") -> bytes:
    """As httpx, and with it the openai package, writes it."""
    request = httpx.Request(
        "POST",
        "http://h/",
        headers={"content-type": f"multipart/form-data; boundary={boundary}"},
        data={"purpose": "batch", "empty": ""},
        files={"file": ('n"ö.jsonl', CONTENT)},
    )
    return request.read()


def fields(reader: FormReader, parts: list[bytes]) -> list[tuple[str, str | None, bytes]]:
    found: list[tuple[str, str | None, bytes]] = []
    for part in parts:
        for event in reader.feed(part):
            if isinstance(event, PartBegin):
                found.append((event.name, event.filename, b""))
            else:
                name, filename, data = found[-1]
                found[-1] = (name, filename, data + event.data)
    return found


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 10_000])
def test_a_form_cut_anywhere_has_the_same_fields(step: int) -> None:
    body = b"preamble\r\n" + form() + b"epilogue"
    reader = FormReader(b"bound-1")
    parts = [body[at : at + step] for at in range(0, len(body), step)]
    purpose, empty, file = fields(reader, parts)
    assert purpose == ("purpose", None, b"batch")
    assert empty == ("empty", None, b"")
    assert (file[0], file[2]) == ("file", CONTENT)
    assert file[1] is not None
    assert "ö" in file[1]
    assert reader.is_complete


def test_a_form_without_its_last_boundary_is_not_complete() -> None:
    reader = FormReader(b"bound-1")
    fields(reader, [form()[:-8]])
    assert not reader.is_complete


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"--b\r\n\r\nx\r\n--b--", "no name"),
        (b'--b\r\nContent-Disposition: attachment; name="a"\r\n\r\nx', "no name"),
        (b"--bc\r\n", "end of a line"),
        (b"--b\r\nA: \xff\r\n\r\n", "UTF-8"),
        *[
            (
                b'--b\r\nContent-Disposition: form-data; name="file"; filename*='
                + charset
                + b"''x\r\n\r\nx\r\n--b--",
                "file's name",
            )
            for charset in (b"undefined", b"a\x00b")
        ],
        (b"--b\r\nA: " + b"x" * 9000, "too long"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=said):
        fields(FormReader(b"b"), [body])


def test_the_boundary_is_in_the_content_type() -> None:
    assert boundary_of(b'multipart/form-data; boundary="a b"') == b"a b"
    with pytest.raises(ApiError) as caught:
        boundary_of(b"application/json")
    assert caught.value.status == 415
    for wrong in (b"multipart/form-data", b"multipart/form-data; boundary=" + b"x" * 71):
        with pytest.raises(ApiError) as caught:
            boundary_of(wrong)
        assert caught.value.status == 400
