"""The specification of a stage rank, and its report once loaded: data without tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Backends with which a token has the same bits in any batch, so also beside drafts.
BATCH_INVARIANT = ("cpu",)
MOST_THREADS = 256  # of a rank: what the pool of the `cpu` backend holds


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One rank of one pipeline stage.

    model_path: Hugging Face folder (config.json, *.safetensors), or one made from a GGUF file.
    ignored_config_keys: of config.json, which would be refused as unknown.
    load_format: "auto" reads safetensors; "dummy" draws weights from `seed`.
    dtype: "auto" (the config's), "float32", "bfloat16" or "float16".
    quantization: of weights at load, one of `model.quantization`. GPTQ and AWQ folders need none.
    backend: "auto" or a name of `kernels.registry.BACKENDS`; resolved and logged.
    num_threads: compute threads of this rank; 0 leaves the choice to the stage.
    cuda_graphs: capture the forward pass on a GPU; False runs every step launch by launch.
    graph_tokens: largest captured hybrid batch, 0 for decodes only. Larger ones run launch by
        launch, for their kernels take longer than their launches.
    symmetric_memory: small all-reduces of a stage's GPUs by torch's symmetric memory.
    one_launch_attention: attention of decodes and chunks in one launch where that measures faster.
    max_adapters, max_adapter_rank: LoRA slots of every layer, and the most rows of an A; 0: none.
    draft_model_path: folder of a model that drafts for this one; None: there is none.
    max_drafts: most drafts of one request in a step.
    hub_model, hub_draft_model: names on the Hugging Face hub, with their commits, of the models
        whose folders these are on another node; None: they have none.
    group_address: "host:port" of the stage's torch.distributed store when tensor_ranks > 1.
    """

    model_path: str
    stage: int = 0
    num_stages: int = 1
    rank: int = 0
    tensor_ranks: int = 1
    ignored_config_keys: tuple[str, ...] = ()
    load_format: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantization: str = "none"
    backend: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    max_requests: int = 128
    max_model_len: int = 4096
    max_step_tokens: int = 8192
    num_threads: int = 0
    seed: int = 0
    group_address: str | None = None
    cuda_graphs: bool = True
    graph_tokens: int = 2048
    symmetric_memory: bool = False
    one_launch_attention: bool = True
    max_adapters: int = 0
    max_adapter_rank: int = 0
    draft_model_path: str | None = None
    max_drafts: int = 0
    hub_model: str | None = None
    hub_draft_model: str | None = None

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_alone(self) -> bool:
        """Its stage is the whole pipeline."""
        return self.num_stages == 1

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def of_draft_model(self) -> StageSpec:
        """Of the model that drafts: unsharded, in one rank of the last stage."""
        assert self.draft_model_path is not None
        return replace(
            self, model_path=self.draft_model_path, stage=0, num_stages=1, rank=0, tensor_ranks=1,
            group_address=None, max_adapters=0, ignored_config_keys=(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One rank's second tier of the prefix cache: KV blocks in host memory, in memory that the
    engines of a node share, and on disk.

    key: all that a block's bytes depend on beside the digest of its content.
    folder: of this key's blocks on disk. Bytes are bounds, 0 for none.
    is_first_start: the folders must then be usable. A rank that replaces another goes on without
        those that fail, and leaves the shares of the dead to its peers.
    shared_root: of all shares of this user; shared_folder: within it, for this key.
    between_nodes: whether ranks of other nodes may fetch what is shared; None: if there are any.
    direct_bytes: of the device, for blocks that go to other engines' devices without host memory.
    """

    key: str
    folder: str
    host_bytes: int
    disk_bytes: int
    is_first_start: bool = True
    shared_root: str = ""
    shared_folder: str = ""
    shared_bytes: int = 0
    between_nodes: bool | None = False
    direct_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageInfo:
    """Report of a loaded rank, before the KV cache is allocated.

    kv_block_bytes: memory of one block over this rank's layers.
    state_bytes: memory of the states of each running request over this rank's layers, 0 for none.
    Both are also of the layers of a draft model.
    available_bytes: memory that is free for KV now.
    device_bytes, own_bytes: the GPU's memory, and what of it this rank takes beside KV; else 0.
    instruction_set: what the backend computes with; another one rounds in another order.
    attention_window: of every layer, see `DecoderConfig`; 0 for none.
    draw_version: of how it draws tokens; another one gives a seed another text.
    """

    hidden_size: int
    vocab_size: int
    max_model_len: int
    dtype: str
    backend: str
    kv_block_bytes: int
    available_bytes: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    instruction_set: str = ""
    draw_version: int = 1
    device_bytes: int = 0
    own_bytes: int = 0
    attention_window: int = 0
    state_bytes: int = 0

    def room_bytes(self, part: float) -> int:
        """Memory for KV of a rank that may take this part of its device. Of a GPU all together:
        processes that come later to it find the same room as those before them."""
        if not self.device_bytes:
            return int(self.available_bytes * part)
        return max(0, min(self.available_bytes, int(self.device_bytes * part) - self.own_bytes))
