"""Numbers that the Sarathi-Serve paper (OSDI '24) publishes, to stand beside simulated ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A simulated number beside the published one, which may be absent.

    bound: "at least" or "at most" where the paper states a limit instead of a value.
    """

    figure: str
    setting: str
    quantity: str
    simulated: float
    published: float | None = None
    bound: str = ""

    @property
    def deviation(self) -> float | None:
        """Relative difference, simulated / published - 1; 0 where a bound holds."""
        if not self.published:
            return None
        off = self.simulated / self.published - 1.0
        holds = (self.bound == "at least" and off >= 0) or (self.bound == "at most" and off <= 0)
        return 0.0 if holds else off

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "deviation": self.deviation}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PublishedRow:
        return cls(**{f.name: data[f.name] for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class PaperDeployment:
    """One of the paper's four systems.

    strict_s, relaxed_s: P99 TBT objectives (Table 3). orca_batch: Orca's batch cap.
    budgets: Sarathi's token budget under (strict, relaxed). guesses: where to start looking for
    capacity (chat, arxiv), QPS.
    """

    model: str
    label: str
    strict_s: float
    relaxed_s: float
    orca_batch: int
    budgets: tuple[int, int]
    guesses: tuple[float, float]

    def slo_s(self, slo: str) -> float:
        return self.strict_s if slo == "strict" else self.relaxed_s


DEPLOYMENTS = (
    PaperDeployment("mistral-7b-a100", "Mistral-7B, 1 A100", 0.1, 0.5, 16, (512, 2048), (2.0, 1.0)),
    PaperDeployment("yi-34b-a100-tp2", "Yi-34B, 2 A100 TP2", 0.2, 1.0, 16, (512, 2048), (1.0, 0.3)),
    PaperDeployment(
        "llama2-70b-a40-tp4-pp2", "LLaMA2-70B, 8 A40 TP4-PP2", 1.0, 5.0, 8, (512, 1536), (0.5, 0.15)
    ),
    PaperDeployment(
        "falcon-180b-a100-tp4-pp2",
        "Falcon-180B, 8 A100 TP4-PP2",
        1.0,
        5.0,
        8,
        (512, 2048),
        (0.5, 0.15),
    ),
)

DATASETS = ("sharegpt4", "arxiv")
SLOS = ("strict", "relaxed")
SYSTEMS = ("orca", "vllm", "sarathi")

# Figures 10 and 11: capacity of Sarathi-Serve over Orca, (sharegpt4 strict, relaxed),
# (arxiv strict, relaxed).
OVER_ORCA = {
    "mistral-7b-a100": {"sharegpt4": (2.78, 2.15), "arxiv": (1.82, 1.97)},
    "yi-34b-a100-tp2": {"sharegpt4": (4.00, 2.44), "arxiv": (1.69, 1.94)},
    "llama2-70b-a40-tp4-pp2": {"sharegpt4": (5.54, 6.31), "arxiv": (4.60, 3.00)},
    "falcon-180b-a100-tp4-pp2": {"sharegpt4": (4.69, 5.62), "arxiv": (4.20, 2.75)},
}

# The loads behind them on two stages, (Orca, Sarathi) in QPS, strict and relaxed. Not published but
# derived: in steps of 0.01 QPS, as the artifact's search rounds them, one pair near the simulated
# loads gives each ratio. None: several do.
LOADS_QPS: Mapping[tuple[str, str], tuple[tuple[float, float], tuple[float, float] | None]] = {
    ("llama2-70b-a40-tp4-pp2", "sharegpt4"): ((0.13, 0.72), (0.13, 0.82)),
    ("llama2-70b-a40-tp4-pp2", "arxiv"): ((0.05, 0.23), None),
    ("falcon-180b-a100-tp4-pp2", "sharegpt4"): ((0.13, 0.61), (0.13, 0.73)),
    ("falcon-180b-a100-tp4-pp2", "arxiv"): ((0.05, 0.21), None),
}

# What the text says of vLLM: (dataset, slo, ratio). "Up to" figures are attained on sharegpt4.
OVER_VLLM = {
    "mistral-7b-a100": (("sharegpt4", "strict", 2.6),),
    "yi-34b-a100-tp2": (("sharegpt4", "strict", 3.7),),
    "llama2-70b-a40-tp4-pp2": (("sharegpt4", "strict", 4.3),),
    "falcon-180b-a100-tp4-pp2": (
        ("sharegpt4", "strict", 3.6),
        ("sharegpt4", "relaxed", 1.48),
    ),
}

# Figure 13: Falcon-180B. (a) median TBT of decode-only batches, TP8 over TP4-PP2; (b) capacity of
# Sarathi over vLLM on TP8, strict.
TP8_OVER_PP_TBT = 2.0
SARATHI_OVER_VLLM_TP8 = 4.3
VLLM_TP8_QPS = 0.14  # derived likewise: 0.61 / 0.14 is 4.36, with 0.15 it would be 4.07

# Table 4, Yi-34B: policy -> dataset -> (P50 TTFT, P99 TBT), seconds.
ABLATION = {
    "hybrid_only": {"sharegpt4": (0.53, 0.68), "arxiv": (3.78, 1.38)},
    "chunked_only": {"sharegpt4": (1.04, 0.17), "arxiv": (5.38, 0.20)},
    "sarathi": {"sharegpt4": (0.76, 0.14), "arxiv": (3.90, 0.17)},
}
ABLATION_QPS = {"sharegpt4": 1.0, "arxiv": 0.5}

# Figure 9: longest naive hybrid iteration over a decode-only one.
INTERFERENCE = 28.3

# Figure 12: (model, objective s, budget, Sarathi over vLLM) as the text states them.
CURVE = (("mistral-7b-a100", 0.1, 512, 3.5), ("yi-34b-a100-tp2", 1.0, 2048, 1.65))
CURVE_OBJECTIVES = {
    "mistral-7b-a100": (0.1, 0.2, 0.3, 0.5, 1.0),
    "yi-34b-a100-tp2": (0.2, 0.35, 0.5, 0.75, 1.0),
}

# Figure 14, measured by the paper's artifact (Yi-34B TP2): prompt -> chunk -> milliseconds.
# Apache-2.0, github.com/microsoft/sarathi-serve, branch osdi-sarathi-serve.
CHUNKING_MS = {
    2047: {512: 435.7, 1024: 444.2, 2048: 377.7, 16384: 378.1},
    4095: {512: 922.0, 1024: 932.3, 2048: 793.9, 16384: 775.4},
    8191: {512: 1958.5, 1024: 1946.2, 2048: 1643.4, 16384: 1754.2},
    16383: {512: 4512.8, 1024: 4357.6, 2048: 3651.6, 16384: 4535.0},
}

# Figure 3, from the same artifact: decode-only step by batch, prefill step by prompt, ms.
DECODE_MS = {1: 46.8, 2: 47.5, 4: 48.8, 8: 69.7, 16: 77.3, 32: 87.9, 64: 127.8, 128: 189.3}
PREFILL_MS = {512: 105.6, 1024: 214.3, 2048: 366.0, 4096: 757.6, 8192: 1863.3, 16384: 4407.5}

# What the text says of Figures 1 to 6 and 8, whose values are only drawn. Bounds are the weakest
# reading of a statement.
STALL_S = 2.0  # Figure 1a, longest time between tokens under vLLM: "several seconds"
OVER_FASTER_TRANSFORMER = 10.0  # section 3.2, throughput of vLLM: "an order of magnitude"
SATURATING_PREFILL = 512  # section 4.1, Figure 4: tokens from which prefill throughput saturates
LINEAR_SHARE = 0.8  # Figure 4: "more than 80 %" of the time, also of long prompts
TILE_STEP = 1.32  # section 4.3: a chunk of 257 tokens over one of 256
# Section 3.3, Falcon-180B, ms: a prompt of 4k tokens, a step of 32 decodes, the bubble between.
PROMPT_4K_MS, DECODES_32_MS, BUBBLE_MS = 1150.0, 200.0, 950.0
