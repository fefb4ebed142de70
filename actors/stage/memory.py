"""How much memory a rank may still take: the machine's, the container's or the GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from actors.scheduling.plan import logit_rows
from actors.stage.spec import StageSpec

if TYPE_CHECKING:
    import torch

    from actors.stage.models.config import DecoderConfig

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_bytes(device: torch.device) -> int:
    """Bytes that are free on the device; on CPU also within the limits of control groups."""
    if device.type == "cuda":
        import torch  # here, as processes that compute nothing ask for their control groups

        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has cached but does not use is available as well.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    free = int(psutil.virtual_memory().available)
    limited = cgroup_headroom_bytes()
    return free if limited is None else min(free, limited)


def control_groups(
    controller: str, root: Path = CGROUPS, own: Path = OWN_CGROUPS
) -> Iterator[Path]:
    """Folders of this process's control groups and of all above them, whose limits hold too: of
    version 2, and of version 1 those of this controller. Some may not exist: a container sees the
    limits of its own group at the top, whatever that is called outside.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, group = line.split(":", 2)
        if not names:
            tops = [root, root / "unified"]  # the latter beside version 1
        elif controller in names.split(","):
            tops = [root / controller]
        else:
            continue
        for top in tops:
            folder = top / group.lstrip("/")
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(top))


def cgroup_headroom_bytes(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int | None:
    """Memory that the control groups may still allocate, the least of theirs; None without a limit.

    The kernel counts page cache as used but reclaims it under pressure, so inactive file pages are
    headroom.
    """
    found = [
        left
        for group in control_groups("memory", root, own)
        for names in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
        if (left := _headroom_bytes(group, *names)) is not None
    ]
    return min(found, default=None)


def _headroom_bytes(group: Path, limit_file: str, used_file: str, reclaimed: str) -> int | None:
    try:
        limit = (group / limit_file).read_text().strip()
        if limit == "max" or int(limit) >= 1 << 60:  # v1 writes a huge number for no limit
            return None
        used = int((group / used_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get(reclaimed, 0)))
    except (OSError, ValueError):
        return None  # not this version of cgroups, or not readable here


def step_bytes(spec: StageSpec, config: DecoderConfig, dtype: torch.dtype) -> int:
    """Memory of a full step beside weights and cache, with a margin for fragmentation."""
    widest = config.activation_width
    rows = logit_rows(spec.max_requests) if spec.is_last else 0
    logits = rows * config.vocab_size * 4 * 2
    return 2 * spec.max_step_tokens * widest * dtype.itemsize // spec.tensor_ranks + logits
