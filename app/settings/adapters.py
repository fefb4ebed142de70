"""The section `adapters` of a deployment's `args`."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.api.schema.common import ServedName


class AdapterSettings(BaseModel):
    """LoRA adapters, each a model of its own name; more are loaded and unloaded live."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_adapters: int = Field(ge=1, le=1024, description="Slots: adapters loaded at a time.")
    max_rank: int = Field(16, ge=1, le=1024, description="Memory of a slot is kept for this rank.")
    paths: Mapping[ServedName, str] = Field(
        default_factory=dict, description="Folders as peft saves them, by name, loaded at start."
    )

    @model_validator(mode="after")
    def _they_fit(self) -> AdapterSettings:
        if len(self.paths) > self.max_adapters:
            raise ValueError(f"{len(self.paths)} paths, but max_adapters is {self.max_adapters}")
        return self
