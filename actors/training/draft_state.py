"""How a state dict is put into a draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.actors.training.adapters import is_adapter
from paceline.actors.weights.checkpoint import tied_names


def load_state(draft: Any, state: Mapping[str, Tensor]) -> None:
    """Copy weights into a draft, in place.

    Raises:
        ValueError: for names that the draft lacks or shapes that differ.
    """
    own = {name: weight for name, weight in draft.state_dict().items() if not is_adapter(name)}
    tied = tied_names(draft)
    missing = [name for name in own if name not in state and name not in tied]
    wrong = [n for n, new in state.items() if n not in own or own[n].shape != new.shape]
    if missing or wrong:
        raise ValueError(f"weights do not fit the draft: missing {missing}, wrong {wrong}")
    with torch.no_grad():
        for name, new in state.items():
            own[name].copy_(new)
