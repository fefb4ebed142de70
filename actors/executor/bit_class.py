"""The bit class of an engine, from its stages' reports: engines of equal classes round alike."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from actors.fleet.snapshot import BitClass
from actors.stage.spec import BATCH_INVARIANT, StageInfo, StageSpec

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 12


async def bit_class_of(spec: StageSpec, info: StageInfo) -> BitClass:
    """The bit class of an engine with these stages. Reads beside the event loop: from slow storage
    it takes minutes, in which a scheduler that shows no life is taken for hung."""
    return BitClass(
        model=await asyncio.to_thread(_weights_of, spec),
        dtype=info.dtype,
        backend=info.backend,
        instruction_set=info.instruction_set,
        quantization=spec.quantization,
        kv_dtype=spec.kv_dtype,
        tensor_ranks=spec.tensor_ranks,
        draw=info.draw_version,
        batch_invariant=info.backend in BATCH_INVARIANT,
    )


def _weights_of(spec: StageSpec) -> str:
    """The folder's name and a digest of its weights.

    Reading whole files would take as long as loading. Samples throughout each file, with its size,
    distinguish revisions and fine-tunes, whatever the folder's path.
    """
    folder = Path(spec.model_path)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if spec.load_format == "dummy":
        digest.update(b"dummy %d" % spec.seed)
    else:
        for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for number in range(_NUM_SAMPLES):
                    file.seek(size * number // _NUM_SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
    return f"{folder.name}-{digest.hexdigest()[:16]}"
