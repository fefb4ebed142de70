"""A Hugging Face Llama config as a GGUF file with random bfloat16 weights, for llama.cpp.

Runs where the `gguf` package is installed (README beside this file).
Usage: python gguf_model.py MODEL_FOLDER OUT.gguf
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np


def _random_bf16(chance: np.random.Generator, *shape: int) -> np.ndarray:
    """Bytes of bfloat16 numbers, as GGUF stores them: the upper halves of float32."""
    values = chance.standard_normal(shape, dtype=np.float32) * 0.02
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


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

    # The benchmarks send token ids, so any vocabulary of the right size does.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(vocab)])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(0)

    chance = np.random.default_rng(0)

    def weight(name: str, rows: int, columns: int) -> None:
        data = _random_bf16(chance, rows, columns)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, np.float32))

    weight("token_embd.weight", vocab, hidden)  # tied: llama.cpp reads it as the output, too
    norm("output_norm.weight")
    for i in range(layers):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        weight(f"blk.{i}.attn_q.weight", heads * width, hidden)
        weight(f"blk.{i}.attn_k.weight", kv_heads * width, hidden)
        weight(f"blk.{i}.attn_v.weight", kv_heads * width, hidden)
        weight(f"blk.{i}.attn_output.weight", hidden, heads * width)
        weight(f"blk.{i}.ffn_gate.weight", inner, hidden)
        weight(f"blk.{i}.ffn_up.weight", inner, hidden)
        weight(f"blk.{i}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
