"""A request whose activations overflow ends with an error; no other stream sees anything of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.engine_client.client import GenerationFailed
from app.engine_client.live import LiveEngine
from tests.live.reference import ask, ask_all, make_prompts, settled

pytestmark = pytest.mark.ray
LENGTHS = (3, 17, 40, 60, 5, 33)
HUGE = 255  # the token whose embedding is nearly all that float16 holds
MAX_TOKENS = 24


def overflowing_model(source: Path, target: Path) -> Path:
    """The tiny model in float16, whose layers add thousands: for one token that is too much."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("down_proj.weight"):
            generator = torch.Generator().manual_seed(1)
            tensors[name] = 200 * torch.randn(tensor.shape, generator=generator)
        if name.endswith("embed_tokens.weight"):
            tensor[HUGE] = 65_000.0
    halves = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
    save_file(halves, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    return target


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
async def test_an_overflow_is_an_error_of_its_own_request(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    kv_dtype: str,
) -> None:
    folder = overflowing_model(tiny_model("llama"), tmp_path / "overflowing")
    engine = make_engine(folder, kv={"dtype": kv_dtype, "memory_gib": 0.001})
    await engine.start()
    prompts = [tuple(t % HUGE for t in prompt) for prompt in make_prompts(LENGTHS)]
    try:
        unfailed = await ask_all(engine, prompts, MAX_TOKENS)
        assert len({tuple(tokens) for tokens in unfailed}) == len(prompts)
        culprit = asyncio.create_task(ask(engine, (HUGE,) * 31, MAX_TOKENS))
        assert await ask_all(engine, prompts, MAX_TOKENS) == unfailed
        with pytest.raises(GenerationFailed, match="not finite"):
            await culprit
        # Its blocks are others' by now.
        assert await ask_all(engine, prompts, MAX_TOKENS) == unfailed
        status = await settled(engine)
        assert status["num_free_blocks"] == status["num_blocks"]
        assert status["recoveries"] == 0
    finally:
        await engine.close()
