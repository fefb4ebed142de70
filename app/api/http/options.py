"""The operator's options of the HTTP API: limits, keys, origins."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
# As a browser sends it; the origin "null", of a page in a file, can be used by any site.
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one API key; None: no limit of that kind.

    admin: may change settings (`POST /console/settings`). max_priority: the highest allowed.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # prompt and completion together
    admin: bool = False
    max_priority: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}: must be positive and finite")


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Settings of the HTTP API. Every limit has a status: 400, 408, 413, 429 or 431.

    api_keys: key -> its limits; empty: no key is needed. A key written `env:NAME` or `file:PATH` is
    the content of that variable or file on the replica's machine.
    public_paths: reachable without a key (exact paths).
    allowed_origins: browser origins ("https://host:port") beside the server's own whose pages may
    send requests and read the answers; "*" for all. Other clients are still checked by their keys.
    allowed_hosts: accepted Host headers (without port), "*" for all; empty: all, or on a loopback
    address only that machine's own names.
    """

    # Read as a part of the YAML's settings, where an unknown key is an error.
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    api_keys: Mapping[str, KeyLimits] = field(default_factory=dict)
    public_paths: frozenset[str] = frozenset({"/health", "/live", "/"})
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    max_body_bytes: int = 1 << 20
    max_json_nodes: int = 20_000  # objects, lists and members in one body
    max_header_bytes: int = 32 << 10
    max_header_count: int = 100
    body_timeout_s: float = 20.0  # for the whole body to arrive
    send_timeout_s: float = 20.0  # a client that reads nothing for this long is dropped
    max_connections: int = 8192  # of a replica that answers HTTP itself
    max_concurrent_requests: int = 1024  # generations at a time in this replica
    unavailable_retry_s: float = 2.0

    max_prompts: int = 256  # in one request
    max_n: int = 64  # continuations of one prompt, best_of included
    max_continuations: int = 256  # prompts x continuations of one request
    max_messages: int = 2048
    max_tools: int = 128
    max_stops: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logprobs: int = 20
    max_logprob_entries: int = 200_000  # of one answer: tokens x (1 + alternatives)
    max_logit_bias: int = 1024
    max_grammar_chars: int = 64 << 10
    max_embedding_inputs: int = 256

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins: {origin!r} is not an origin: write http://host or "
                    "https://host:port, in lower case and with nothing behind it, or *"
                )

    @property
    def is_local(self) -> bool:
        """Whether only this machine's own names are served."""
        return bool(self.allowed_hosts) and all(_is_loopback(host) for host in self.allowed_hosts)


def at_address(options: ApiOptions, host: str) -> ApiOptions:
    """The options of a server that listens on this host: on loopback it accepts only local names.

    Otherwise any page could let its own name resolve to this machine (DNS rebinding), and read
    answers and change settings like a local client.
    """
    if options.allowed_hosts or not _is_loopback(host):
        return options
    return replace(options, allowed_hosts=tuple(dict.fromkeys((*LOOPBACK_HOSTS, host))))


def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False
