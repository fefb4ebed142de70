"""A Hugging Face folder as an OpenVINO model in bfloat16, for openvino_server.py.

A folder without weights gets random ones. Runs where openvino-genai and optimum-intel are installed
(README beside this file).
Usage: python openvino_model.py MODEL_FOLDER OUT_FOLDER
"""

import sys
import tempfile
from pathlib import Path

import openvino as ov
import openvino_tokenizers
import torch
from optimum.intel import OVModelForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as made:
        source = folder
        if not list(folder.glob("*.safetensors")):
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(folder)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(made)
            source = Path(made)
        model = OVModelForCausalLM.from_pretrained(
            source, export=True, load_in_8bit=False, compile=False, dtype=torch.bfloat16
        )
        model.save_pretrained(out)
    if (folder / "tokenizer.json").exists():
        both = openvino_tokenizers.convert_tokenizer(
            AutoTokenizer.from_pretrained(folder), with_detokenizer=True
        )
        for name, part in zip(("tokenizer", "detokenizer"), both, strict=True):
            ov.save_model(part, out / f"openvino_{name}.xml")


main()
