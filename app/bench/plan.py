"""The plan of `legato bench compare` (YAML): the servers, how to start each, what to measure."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.bench.load.client import server_root
from app.bench.load.stall import STREAM_TOKENS
from app.bench.speculating import SpeculationProbe


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DecodeProbe(_Part):
    """Streams that all decode at once: output tokens per second between their first and last."""

    streams: list[int] = [1, 8, 32]
    prompt_tokens: int = 128
    output_tokens: int = 192


class PrefillProbe(_Part):
    """Prompts one at a time, one token asked of each: prompt tokens per second."""

    prompt_tokens: int = 512
    repeats: int = 6


class StallProbe(_Part):
    """The longest gap of running streams when a long prompt arrives."""

    streams: int = 16
    prompt_tokens: int = 3000
    stream_tokens: int = STREAM_TOKENS
    repeats: int = 3


class CapacityProbe(_Part):
    """Highest Poisson load under each P99 TBT objective, by bisection."""

    tbt_ms: list[float] = [50.0, 100.0, 500.0]
    lengths: str = "sharegpt/8"
    seconds: float = 25.0
    tolerance: float = 0.1


class ServerPlan(_Part):
    """One server. `$NAME` in the command is taken from the environment.

    sends_objective: its requests carry `slo: {tbt_ms}`, as Legato takes it.
    plain: of one that speculates, the name of the same server without.
    """

    command: str
    url: str
    environment: dict[str, str] = {}
    sends_objective: bool = False
    guess_qps: float = 4.0
    ready_s: float = 300.0
    plain: str | None = None


class ComparisonPlan(_Part):
    servers: dict[str, ServerPlan]
    rounds: int = Field(1, ge=1)
    settle_s: float = 0.0  # rest after the start: memory is still being cleared, graphs warmed
    decode: DecodeProbe | None = DecodeProbe()
    prefill: PrefillProbe | None = PrefillProbe()
    stall: StallProbe | None = StallProbe()
    capacity: CapacityProbe | None = CapacityProbe()
    speculation: SpeculationProbe | None = None

    @model_validator(mode="after")
    def _has_the_plain_servers(self) -> ComparisonPlan:
        for name, server in self.servers.items():
            if server.plain is None:
                continue
            if server.plain not in self.servers:
                raise ValueError(f"servers.{name}.plain: no server {server.plain!r}")
            if _address(server.url) == _address(self.servers[server.plain].url):
                raise ValueError(
                    f"servers.{name}.url: also that of {server.plain!r}, which runs beside it"
                )
        return self

    @property
    def has_figures(self) -> bool:
        """Whether a server is measured alone."""
        return any((self.decode, self.prefill, self.stall, self.capacity))


def _address(url: str) -> tuple[str, int, str]:
    """Equal for two ways to write one address. Raises ValueError if its port is none."""
    parts = urlsplit(server_root(url))
    host = parts.hostname or ""  # in lower case
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return "localhost" if host in ("127.0.0.1", "::1") else host, port, parts.path
