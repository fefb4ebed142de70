"""Host arrays to a device without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The values on the device; on CPU the array itself. To a GPU through pinned memory: a copy
    from any other first waits for what the stream has queued."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
