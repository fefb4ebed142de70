"""How many tokens the answers of a batch have used, in OpenAI's form."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

_USAGE: Final = re.compile(rb'"usage": ?(?=\{)')
_MAX_BYTES: Final = 2000  # of the object
_decoder: Final = json.JSONDecoder()


@dataclass(slots=True)
class BatchUsage:
    num_input: int = 0
    num_cached: int = 0  # of the input
    num_output: int = 0
    num_reasoning: int = 0  # of the output

    def add(self, content: bytes) -> None:
        """Add those of an answer of any route. Only its last `usage` is read: the rest may be long.
        No text within holds such a key, as its quotation marks are escaped."""
        found = list(_USAGE.finditer(content))
        if not found:
            return
        begin = found[-1].end()
        text = content[begin : begin + _MAX_BYTES].decode(errors="replace")
        usage, _ = _decoder.raw_decode(text)
        self.num_input += usage.get("input_tokens", usage.get("prompt_tokens", 0))
        self.num_output += usage.get("output_tokens", usage.get("completion_tokens", 0))
        self.num_cached += _detail(usage, ("input", "prompt"), "cached_tokens")
        self.num_reasoning += _detail(usage, ("output", "completion"), "reasoning_tokens")

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "input_tokens": self.num_input,
            "input_tokens_details": {"cached_tokens": self.num_cached},
            "output_tokens": self.num_output,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": self.num_input + self.num_output,
        }


def _detail(usage: dict[str, Any], names: tuple[str, str], key: str) -> int:
    details = [usage.get(f"{name}_tokens_details") or {} for name in names]
    return sum(one.get(key) or 0 for one in details)
