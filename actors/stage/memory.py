"""How much memory a rank may still take: the machine's, the container's or the GPU's."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Bytes that are free on the device; on CPU also within the cgroup's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has cached but does not use is available as well.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    free = int(psutil.virtual_memory().available)
    limited = cgroup_headroom_bytes(_CGROUP)
    return free if limited is None else min(free, limited)


def cgroup_headroom_bytes(root: Path) -> int | None:
    """Memory that the container may still allocate, None without a limit; for cgroup v2 and v1.

    The kernel counts page cache as used but reclaims it under pressure, so inactive file pages are
    headroom.
    """
    v1 = root / "memory"
    for limit_file, used_file, stat_file, key in (
        (root / "memory.max", root / "memory.current", root / "memory.stat", "inactive_file"),
        (v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes", v1 / "memory.stat",
         "total_inactive_file"),
    ):  # fmt: skip
        try:
            limit = limit_file.read_text().strip()
            if limit == "max" or int(limit) >= 1 << 60:  # v1 writes a huge number for no limit
                return None
            used = int(used_file.read_text())
            stat = dict(line.split() for line in stat_file.read_text().splitlines())
            return max(0, int(limit) - used + int(stat.get(key, 0)))
        except (OSError, ValueError):
            continue  # not this version of cgroups, or not readable here
    return None
