"""What dead processes leave in shared memory.

Ray's channels are guarded by named semaphores, which it does not remove: a dozen for each graph,
after a clean end too. Their names tell the process that made them, and what it made is nobody's
once it is gone.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

_SHARED: Final = Path("/dev/shm")
_NAME: Final = re.compile(r"sem\.(?:hdr|obj)(\d+)-\d+")


def remove_semaphores(folder: Path = _SHARED) -> int:
    """Remove this user's semaphores of processes that have ended; returns how many."""
    num_removed = 0
    with suppress(OSError):  # no such folder: nothing to do
        for file in list(os.scandir(folder)):
            found = _NAME.fullmatch(file.name)
            if found is None or _is_alive(int(found[1])):
                continue
            with suppress(OSError):  # gone by now
                if file.stat(follow_symlinks=False).st_uid == os.geteuid():
                    os.unlink(file.path)
                    num_removed += 1
    return num_removed


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
