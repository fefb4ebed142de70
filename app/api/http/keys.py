"""API keys and their limits.

Keys are stored and compared as digests, always all of them, so that the timing of an answer
reveals nothing about them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from app.api.http.errors import ApiError
from app.api.http.options import KeyLimits


class TokenBucket:
    """Allows `per_minute` on average, and as much at once; charging may leave a debt."""

    __slots__ = ("_clock", "_level", "_per_s", "_size", "_stamp_s")

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._size = per_minute
        self._per_s = per_minute / 60.0
        self._level = per_minute
        self._clock = clock
        self._stamp_s = clock()

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` could be taken; an amount above the size needs a full bucket."""
        now_s = self._clock()
        self._level = min(self._size, self._level + (now_s - self._stamp_s) * self._per_s)
        self._stamp_s = now_s
        missing = min(amount, self._size) - self._level
        return max(0.0, missing / self._per_s)

    def charge(self, amount: float) -> None:
        """Take it, whatever the level."""
        self.wait_s(0.0)
        self._level -= amount


class Allowance:
    """One key's name (a digest, safe to log) and its limits."""

    def __init__(self, name: str, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self.name = name
        self.is_admin = limits.admin
        self.max_priority = limits.max_priority
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = None if requests is None else TokenBucket(requests, clock)
        self._tokens = None if tokens is None else TokenBucket(tokens, clock)

    def admit_request(self) -> None:
        """Count one request; raises 429."""
        self._admit(self._requests, 1.0, "requests")

    def admit_prompt(self, num_tokens: int) -> None:
        """Count a prompt; raises 429."""
        self._admit(self._tokens, float(num_tokens), "tokens")

    def charge_tokens(self, num_tokens: int) -> None:
        """Count generated tokens; an excess delays the next request."""
        if self._tokens is not None:
            self._tokens.charge(num_tokens)

    def _admit(self, bucket: TokenBucket | None, amount: float, what: str) -> None:
        if bucket is None:
            return
        wait_s = bucket.wait_s(amount)
        if wait_s > 0.0:
            raise ApiError(
                429,
                f"This key's limit of {what} per minute is reached.",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        bucket.charge(amount)


class ApiKeyError(ValueError):
    """A key of the settings cannot be read here; the message names it."""


def read_key(written: str) -> str:
    """The key, from a variable or a file if it names one, without spaces around it. Raises
    ApiKeyError, also where nothing is left."""
    written = written.strip()
    kind, _, name = written.partition(":")
    if kind == "env":
        key = os.environ.get(name, "").strip()
    elif kind == "file":
        try:
            key = Path(name).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ApiKeyError(f"api.api_keys: {written}: {reason}") from error
    else:
        key = written
    if not key:
        raise ApiKeyError(f"api.api_keys: {written or repr(written)}: it holds no key")
    return key


def read_digest(written: str) -> bytes:
    """The key's digest, which is all that a server needs of it. Raises ApiKeyError."""
    kind, _, number = written.strip().partition(":")
    if kind != "sha256":
        return _digest(read_key(written))
    if re.fullmatch(r"[0-9a-fA-F]{64}", number) is None:
        raise ApiKeyError("api.api_keys: sha256:...: a digest has 64 hexadecimal digits")
    return bytes.fromhex(number)


def read_digests(keys: Iterable[str]) -> list[bytes]:
    """Those of all keys. Raises ApiKeyError also for two of which one name is made, by which files,
    batches and cached prefixes belong to a key."""
    digests, of_name = list[bytes](), dict[str, bytes]()
    for written in keys:
        digests.append(digest := read_digest(written))
        name = _named(digest)
        if of_name.setdefault(name, digest) != digest:
            raise ApiKeyError(
                f"api.api_keys: {shown_key(written)}: another key is called {name} too, and would "
                "have the same files: choose another key"
            )
    return digests


def by_digest(written: str) -> str:
    """The same key of the settings without the key itself in it."""
    written = written.strip()
    if written.startswith(("env:", "file:", "sha256:")):
        return written
    return f"sha256:{_digest(written).hex()}"


def shown_key(written: str) -> str:
    """What messages call a key of the settings: where it is, else its digest's beginning."""
    kind, _, number = by_digest(written).partition(":")
    return f"key-{number[:8].lower()}" if kind == "sha256" else written.strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _named(digest: bytes) -> str:
    return "key-" + digest.hex()[:8]


def given_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The Authorization header, or as one the header in which Anthropic's clients send a key: they
    do so on every route, /v1/models among them, also beside credentials for a proxy."""
    given, key = headers.get(b"authorization"), headers.get(b"x-api-key")
    is_key = given is not None and given[:7].lower() == b"bearer "
    return given if is_key or key is None else b"Bearer " + key


class KeyRing:
    """All keys of this server."""

    def __init__(
        self, keys: Mapping[str, KeyLimits], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._allowances: list[tuple[bytes, Allowance]] = []
        for digest, limits in zip(read_digests(keys), keys.values(), strict=True):
            self._allowances.append((digest, Allowance(_named(digest), limits, clock)))

    def admit(self, authorization: bytes | None) -> Allowance:
        """The allowance of the key in an Authorization header; raises 401 or 429."""
        scheme, _, key = (authorization or b"").partition(b" ")
        key = key.strip()
        digest = hashlib.sha256(key).digest()
        found: Allowance | None = None
        for known, allowance in self._allowances:
            if hmac.compare_digest(known, digest):
                found = allowance
        if found is None or not key or scheme.lower() != b"bearer":
            raise ApiError(
                401,
                "Give a valid API key: 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        found.admit_request()
        return found
