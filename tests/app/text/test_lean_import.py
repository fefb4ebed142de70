"""Processes that compute nothing hold no torch: what they import of its users does without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

_DEMO = Path(__file__).parents[3] / "configs/models/demo"
_CODE = """
import sys
from app.text.lean_import import import_tokenizers_alone
import_tokenizers_alone()
from app.text.processor import TextProcessor
text = TextProcessor(sys.argv[1])
assert "torch" not in sys.modules, "transformers has imported torch"
import torch  # is still importable
print(*text.encode_now("Tokens never stall: 3 + 4 = 7."))
"""


def test_tokenizers_load_without_torch() -> None:
    command = [sys.executable, "-c", _CODE, str(_DEMO)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "PyTorch was not found" not in ended.stderr
    from app.text.processor import TextProcessor

    expected = TextProcessor(_DEMO).encode_now("Tokens never stall: 3 + 4 = 7.")
    assert ended.stdout.split() == list(map(str, expected))


_GRAMMARS = """
import sys
from app.text.lean_import import import_grammars_alone
import_grammars_alone()
import xgrammar
from pathlib import Path
from actors.stage.grammars.tokenizer import read_tokenizer
info = xgrammar.TokenizerInfo.from_huggingface(read_tokenizer(Path(sys.argv[1])))
compiler = xgrammar.GrammarCompiler(info, max_threads=1)
matcher = xgrammar.GrammarMatcher(compiler.compile_regex("[ab]+"))
print(matcher.accept_string("abba"), matcher.accept_string("c"), "torch" in sys.modules)
import torch
print(torch.ones(2).sum().item())
"""


def test_grammars_compile_without_torch() -> None:
    command = [sys.executable, "-c", _GRAMMARS, str(_DEMO)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["True", "False", "False", "2.0"]
