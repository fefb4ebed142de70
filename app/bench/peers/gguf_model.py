"""A Hugging Face Llama folder as a GGUF file in bfloat16, for llama.cpp.

A folder without weights gets random ones. Runs where the `gguf` package is installed (README beside
this file).
Usage: python gguf_model.py MODEL_FOLDER OUT.gguf
"""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

Weight = Callable[[str, int, int], np.ndarray]  # by its name in the folder, rows and columns


def _random() -> Weight:
    chance = np.random.default_rng(0)

    def weight(name: str, rows: int, columns: int) -> np.ndarray:
        if rows == 1:
            return np.full((1, columns), 0x3F80, np.uint16)  # a norm's ones
        values = chance.standard_normal((rows, columns), dtype=np.float32) * 0.02
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    return weight


def _read(path: Path) -> Weight:
    data = np.memmap(path, np.uint8, "r")
    (length,) = struct.unpack("<Q", bytes(data[:8]))
    tensors = json.loads(bytes(data[8 : 8 + length]))

    def weight(name: str, rows: int, columns: int) -> np.ndarray:
        begin, end = (8 + length + offset for offset in tensors[name]["data_offsets"])
        assert tensors[name]["dtype"] == "BF16", name
        return np.frombuffer(data[begin:end].tobytes(), np.uint16).reshape(rows, columns)

    return weight


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in llama.cpp's order: it rotates neighbours, Hugging Face halves."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _add_vocabulary(writer: gguf.GGUFWriter, folder: Path, vocab: int, eos: int) -> None:
    """The folder's, for the text of answers, filled up to the right size: prompts are token ids."""
    filler = [f"t{i}" for i in range(vocab)]
    tokens, merges, special = filler, ["t 0"], set[int]()
    if (folder / "tokenizer.json").exists():
        read = json.loads((folder / "tokenizer.json").read_text())
        known = sorted(read["model"]["vocab"], key=read["model"]["vocab"].__getitem__)
        tokens = known + filler[len(known) :]
        merges = [" ".join(pair) for pair in read["model"]["merges"]]
        special = {token["id"] for token in read["added_tokens"]}
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if i in special else kinds.NORMAL for i in range(vocab)])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(eos)


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((folder / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, inner, vocab = config["head_dim"], config["intermediate_size"], config["vocab_size"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_vocabulary(writer, folder, vocab, config["eos_token_id"][0])

    weights = folder / "model.safetensors"
    read = _read(weights) if weights.exists() else _random()

    def weight(name: str, source: str, rows: int, columns: int, rotated_heads: int = 0) -> None:
        data = read(f"model.{source}.weight", rows, columns)
        if rotated_heads:
            data = _interleaved(data, rotated_heads)
        data = np.ascontiguousarray(data).view(np.uint8)  # GGUF's bfloat16 is bytes
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name: str, source: str) -> None:
        bits = read(f"model.{source}.weight", 1, hidden).astype(np.uint32) << 16
        writer.add_tensor(f"{name}.weight", bits.view(np.float32).reshape(hidden))

    weight("token_embd", "embed_tokens", vocab, hidden)  # tied: llama.cpp reads it as the output
    norm("output_norm", "norm")
    for i in range(layers):
        block, layer = f"blk.{i}", f"layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        norm(f"{block}.attn_norm", f"{layer}.input_layernorm")
        norm(f"{block}.ffn_norm", f"{layer}.post_attention_layernorm")
        weight(f"{block}.attn_q", f"{attention}.q_proj", heads * width, hidden, heads)
        weight(f"{block}.attn_k", f"{attention}.k_proj", kv_heads * width, hidden, kv_heads)
        weight(f"{block}.attn_v", f"{attention}.v_proj", kv_heads * width, hidden)
        weight(f"{block}.attn_output", f"{attention}.o_proj", hidden, heads * width)
        weight(f"{block}.ffn_gate", f"{mlp}.gate_proj", inner, hidden)
        weight(f"{block}.ffn_up", f"{mlp}.up_proj", inner, hidden)
        weight(f"{block}.ffn_down", f"{mlp}.down_proj", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
