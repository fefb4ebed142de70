"""Model shapes and devices that deployments are composed from."""

from __future__ import annotations

from dataclasses import dataclass


def experts_touched(num_experts: int, per_token: int, num_tokens: float) -> float:
    """Distinct experts that a step of so many tokens is expected to read, under even routing.

    >>> [round(experts_touched(32, 8, n), 1) for n in (1, 2, 4, 8)]
    [8.0, 14.0, 21.9, 28.8]
    """
    return num_experts * (1.0 - (1.0 - per_token / num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixtures of experts of a model.

    per_token: of each layer's `number`. width: inner size of one expert. num_layers: layers with a
    mixture; the others have one MLP. shared: inner size of the experts that every token passes.
    """

    number: int
    per_token: int
    width: int
    num_layers: int
    shared: int = 0


@dataclass(frozen=True, slots=True)
class StateLayers:
    """The layers of a model that keep a state in place of keys and values.

    inputs, outputs: widths of a layer's projections from and to the hidden state. state_bytes: of a
    layer, of one position: matrices in float32, a convolution's last inputs at two bytes.
    """

    num_layers: int
    inputs: int
    outputs: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions that determine a transformer's cost.

    profiled: the layer shape whose published timings are scaled to this one. gated: the MLP has a
    gate beside its up projection. window: attention window in tokens, 0 for none. intermediate:
    inner size of the MLP in layers without experts. gated_attention: so is the result of attention.
    attending: layers with attention; None: those without states. mlps: layers with an MLP or
    experts; None: all.
    """

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    profiled: str
    gated: bool = True
    all_reduces: int = 2  # per layer; 1 where attention and MLP run in parallel, or in one each
    window: int = 0
    max_model_len: int = 16384
    experts: Experts | None = None
    states: StateLayers | None = None
    gated_attention: bool = False
    attending: int | None = None
    mlps: int | None = None

    @property
    def state_layers(self) -> int:
        return self.states.num_layers if self.states else 0

    @property
    def attention_layers(self) -> int:
        return self.num_layers - self.state_layers if self.attending is None else self.attending

    @property
    def mlp_layers(self) -> int:
        return self.num_layers if self.mlps is None else self.mlps

    @property
    def norms_per_layer(self) -> float:
        """One before attention or states, side by side or not, and one before an MLP."""
        mixing = min(self.num_layers, self.attention_layers + self.state_layers)
        return (mixing + self.mlp_layers) / self.num_layers

    @property
    def matrices(self) -> dict[str, float]:
        """Weights by operator group that every token passes: of a layer, as a mean over layers."""
        share, router = self.expert_share, 0.0
        inner = self.intermediate * (self.mlp_layers / self.num_layers - share)
        if self.experts is not None:
            inner += share * self.experts.shared
            router = share * self.experts.number * self.hidden
        mlp = self.mlp(inner)
        query = self.heads * (2 if self.gated_attention else 1)
        qkv = float((query + 2 * self.kv_heads) * self.head_dim)
        out = float(self.heads * self.head_dim)
        if self.states is not None:
            with_states = self.state_layers / self.num_layers
            attending = self.attention_layers / self.num_layers
            qkv = attending * qkv + with_states * self.states.inputs
            out = attending * out + with_states * self.states.outputs
        return {
            "qkv": self.hidden * qkv,
            "out": self.hidden * out,
            "up": mlp["up"] + router,
            "down": mlp["down"],
        }

    def mlp(self, inner: float) -> dict[str, float]:
        """Weights of an MLP of this inner size by operator group."""
        up = self.hidden * inner * (2 if self.gated else 1)
        return {"up": up, "down": inner * self.hidden}

    @property
    def expert_share(self) -> float:
        """Share of the layers that have experts."""
        return self.experts.num_layers / self.num_layers if self.experts else 0.0

    @property
    def weight_bytes(self) -> float:
        """All weights at two bytes."""
        layer = sum(self.matrices.values())
        if self.experts is not None:
            one = sum(self.mlp(self.experts.width).values())
            layer += self.expert_share * self.experts.number * one
        return 2.0 * (self.num_layers * layer + 2 * self.vocab * self.hidden)

    @property
    def kv_bytes_per_token(self) -> float:
        return 4.0 * self.attention_layers * self.kv_heads * self.head_dim

    @property
    def state_bytes(self) -> float:
        """Of one request: two rows that steps read and write in turn, and one that is saved."""
        return 3.0 * self.state_layers * self.states.state_bytes if self.states else 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator. Where attention was not profiled, A100's is scaled by the two ratios."""

    name: str
    memory_bytes: float
    attention_compute: float = 1.0  # times slower than an A100 at matrix products
    attention_memory: float = 1.0  # times slower at reading memory


# The ratios are those of the profiled linear layers (Llama-2-70B, TP 4): 4096 tokens and 1 token.
DEVICES = {
    "a100": Device("a100", 80e9),
    "a40": Device("a40", 48e9, attention_compute=2.09, attention_memory=2.57),
}

MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("mistral-7b", 32, 4096, 14336, 32, 8, 128, 32000, "llama-3-8b", window=4096),
        ModelShape("yi-34b", 60, 7168, 20480, 56, 8, 128, 64000, "codellama-34b"),
        ModelShape("llama2-70b", 80, 8192, 28672, 64, 8, 128, 32000, "llama-2-70b"),
        ModelShape(
            "falcon-180b",
            80,
            14848,
            59392,
            232,
            8,
            64,
            65024,
            "llama-2-70b",
            gated=False,
            all_reduces=1,
        ),
    )
}
