"""Every family by its architecture name."""

from __future__ import annotations

from actors.stage.models import families_gemma, families_gpt, families_llama
from actors.stage.models.family import Family

FAMILIES: dict[str, Family] = {
    **families_llama.FAMILIES,
    **families_gemma.FAMILIES,
    **families_gpt.FAMILIES,
}
