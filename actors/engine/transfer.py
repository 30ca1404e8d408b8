"""From Python numbers to a tensor where the models are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def device_tensor(values: Sequence[object], device: torch.device) -> Tensor:
    """Integers as int64, floats as float32; nested sequences as more dimensions.

    To a GPU they go through page-locked memory, so that nobody waits for the copy.
    """
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)
