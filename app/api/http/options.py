"""The operator's options of the HTTP API: limits, keys, origins."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
# As a browser sends it; the origin "null", of a page in a file, can be used by any site.
_NAME: Final = re.compile(r"[^\s/?#@:\[\]]+")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+")
# Read as a part of the YAML's settings, where an unknown key is an error.
_SECTION: Final = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, config=_SECTION)
class KeyLimits:
    """The limits of one API key."""

    requests_per_minute: float | None = Field(default=None, gt=0, description="Absent: no limit.")
    tokens_per_minute: float | None = Field(
        default=None,
        gt=0,
        description="Prompt and completion together; absent: no limit.",
    )
    admin: bool = Field(
        default=False, description="May change settings (`POST /console/settings`)."
    )
    max_priority: int | None = Field(
        default=None, description="The highest `priority` allowed; absent: any."
    )


@dataclass(frozen=True, slots=True, config=_SECTION)
class ApiOptions:
    """Settings of the HTTP API. Every limit has a status: 400, 408, 413, 429 or 431."""

    api_keys: Mapping[str, KeyLimits] = Field(
        default_factory=dict,
        description="Key to its limits; without any, no key is needed. A key written "
        "`env:NAME` or `file:PATH` is the content of that variable or file on the "
        "replica's machine; `sha256:HEX` is the key with that digest.",
    )
    public_paths: frozenset[str] = Field(
        default=frozenset({"/health", "/live", "/"}),
        description="Reachable without a key (exact paths); with `/`, the console's page, also "
        "its scripts, styles and icon, which hold no data.",
    )
    allowed_origins: tuple[str, ...] = Field(
        default=(),
        description="Browser origins (`https://host:port`) beside the server's own whose "
        "pages may send requests and read the answers; `*` for all. Other clients "
        "are still checked by their keys.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Accepted Host headers (without port), `*` for all; empty: all. On a loopback "
        "address that machine's own names are accepted too, or alone.",
    )

    max_body_bytes: int = Field(default=2 << 20, ge=1, description="Body of a request.")
    max_json_nodes: int = Field(
        default=20_000, ge=1, description="Objects, lists and members in one body."
    )
    max_header_bytes: int = Field(default=32 << 10, ge=1, description="All headers of a request.")
    max_header_count: int = Field(default=100, ge=1, description="Headers of a request.")
    body_timeout_s: float = Field(default=20.0, gt=0, description="For the whole body to arrive.")
    send_timeout_s: float = Field(
        default=20.0, gt=0, description="A client that reads nothing for this long is dropped."
    )
    keep_alive_s: float = Field(
        default=25.0,
        gt=0,
        description="A stream that sends nothing for this long, in a queue or a long prefill, gets "
        "a comment (Anthropic's `ping`), so that no proxy ends it. It begins with status 200 then: "
        "a later refusal is an event.",
    )
    max_connections: int = Field(
        default=8192, ge=1, description="Of a replica that answers HTTP itself (`listen`)."
    )
    max_concurrent_requests: int = Field(
        default=1024, ge=1, description="Generations at a time in one replica."
    )
    unavailable_retry_s: float = Field(
        default=2.0, gt=0, description="When to try again while the engine is not ready."
    )

    max_prompts: int = Field(default=256, ge=1, description="Prompts of one request.")
    max_n: int = Field(
        default=64, ge=1, description="Continuations of one prompt, `best_of` included."
    )
    max_continuations: int = Field(
        default=256, ge=1, description="Prompts times continuations of one request."
    )
    max_messages: int = Field(default=2048, ge=1, description="Messages of a conversation.")
    max_tools: int = Field(default=128, ge=0, description="Tools of a request.")
    max_stops: int = Field(default=16, ge=0, description="Stop strings of a request.")
    max_stop_chars: int = Field(default=256, ge=1, description="Characters of a stop string.")
    max_stop_token_ids: int = Field(default=64, ge=0, description="Stop token ids of a request.")
    max_logprobs: int = Field(default=20, ge=0, description="Alternatives to each token.")
    max_logprob_entries: int = Field(
        default=200_000, ge=1, description="Of one answer: tokens times (1 + alternatives)."
    )
    max_logit_bias: int = Field(default=1024, ge=0, description="Biased tokens of a request.")
    max_grammar_chars: int = Field(
        default=64 << 10,
        ge=0,
        description="Characters of a grammar or JSON schema; eight times as many of the schemas of "
        "all tools together, where a grammar keeps to them.",
    )
    max_embedding_inputs: int = Field(
        default=2048, ge=1, description="Inputs of one request for embeddings."
    )

    def __post_init__(self) -> None:
        if not all(key.strip() for key in self.api_keys):
            raise ValueError("api_keys: one is empty, and would admit whoever sends none")
        for host in self.allowed_hosts:
            if host != "*" and not is_host(host):
                raise ValueError(
                    f"allowed_hosts: {host!r} is not a host: write a name or an address, without "
                    "http:// and without a port, or *"
                )
        for path in self.public_paths:
            if not path.startswith("/"):
                raise ValueError(f"public_paths: {path!r} is no path: write /{path}")
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
    """The options of a server that listens on this host: on loopback it accepts local names, and
    beside them only those that are configured, such as a proxy's.

    Otherwise any page could let its own name resolve to this machine (DNS rebinding), and read
    answers and change settings like a local client.
    """
    if not _is_loopback(host):
        return options
    names = (*LOOPBACK_HOSTS, host, *options.allowed_hosts)
    return replace(options, allowed_hosts=tuple(dict.fromkeys(names)))


def is_host(text: str) -> bool:
    """Whether it is a name or an address, and nothing else."""
    try:
        return bool(_NAME.fullmatch(text)) or ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False
