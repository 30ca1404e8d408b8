"""Transfer of Python numbers to the models' device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def device_tensor(values: Sequence[object], device: torch.device) -> Tensor:
    """Make a tensor of integers (int64) or floats (float32); nested sequences are dimensions.

    Transfers to a GPU use pinned memory and do not block.
    """
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)
