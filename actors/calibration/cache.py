"""Measured cost models, stored in the user's cache folder for later starts."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from actors.scheduling.cost.model import CostModel
from actors.stage.spec import StageInfo, StageSpec

logger = logging.getLogger("legato.calibration")


# Of a cost model: what it tells of the engine, and not of its steps
MEMORY = ("kv_tokens", "state_tokens", "num_states", "max_model_len")


class Reach(NamedTuple):
    """How far steps were measured: the most tokens of one, and the most KV that one's decodes
    attend to."""

    tokens: int = 0
    kv: int = 0


_NOWHERE = Reach()


def cache_folder() -> Path:
    """`$LEGATO_CACHE`, else `legato` in the user's cache folder."""
    own = os.environ.get("LEGATO_CACHE")
    if own:
        return Path(own).expanduser()  # which no shell has done for a service
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "legato"


def key_of(spec: StageSpec, info: StageInfo) -> dict[str, Any]:
    """Everything that affects step times."""
    config = (Path(spec.model_path) / "config.json").read_bytes()
    return {
        "model": hashlib.sha256(config).hexdigest()[:16],
        "dtype": info.dtype,
        "kv_dtype": spec.kv_dtype,
        "quantization": spec.quantization,
        "backend": info.backend,
        "device": spec.device,
        "threads": spec.num_threads,
        "cores": os.cpu_count(),
        "processor": _processor(),
        "instruction_set": info.instruction_set,
        "num_stages": spec.num_stages,
        "tensor_ranks": spec.tensor_ranks,
        "block_size": spec.block_size,
        "attention_window": info.attention_window,
        "versions": [_version("legato-serve"), _version("torch")],
    }


def _processor() -> str:
    """Name, family and model, because virtual machines name several generations alike."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return ""
    halves = (line.partition(":") for line in first.splitlines())
    told = {key.strip(): value.strip() for key, _, value in halves}
    return " ".join(told.get(key, "") for key in ("model name", "cpu family", "model")).strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class CostModelFile:
    """One engine's cost model. If the file cannot be read or written, the next start calibrates."""

    path: Path
    key: dict[str, Any]

    @classmethod
    def of(cls, spec: StageSpec, info: StageInfo) -> CostModelFile:
        key = key_of(spec, info)
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
        name = f"{Path(spec.model_path).name}-{digest}.json"
        return cls(cache_folder() / "cost_models" / name, key)

    def load(self, reach: Reach = _NOWHERE) -> CostModel | None:
        """The model saved under the same key, or None; also where its steps reached less far:
        beyond what was measured, a GPU's steps are longer than the last ones foretell. Its memory
        is that of the engine that saved it."""
        model, reached = self._read()
        return model if reached.tokens >= reach.tokens and reached.kv >= reach.kv else None

    def _read(self) -> tuple[CostModel | None, Reach]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["key"] == self.key:
                reached = Reach(int(content["reach_tokens"]), int(content.get("reach_kv", 0)))
                return CostModel.from_dict(content["cost_model"]), reached
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is not used: %s", self.path, error)
        return None, _NOWHERE

    def save_learnt(self, model: CostModel) -> None:
        """Save the corrections of a profile that is saved. Another, which a later engine has
        measured since, stays: it may reach further."""
        known, reached = self._read()
        own = {name: getattr(model, name) for name in ("learnt", *MEMORY)}
        if known is not None and replace(known, **own) == model:
            self.save(model, reached)

    def save(self, model: CostModel, reach: Reach = _NOWHERE) -> None:
        """reach: of the steps that were to be measured."""
        content = {
            "key": self.key,
            "reach_tokens": reach.tokens,
            "reach_kv": reach.kv,
            "cost_model": model.to_dict(),
        }
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            part.replace(self.path)  # atomic: readers see the old or the new file
        except OSError as error:
            logger.warning("the cost model is not kept: %s", error)
