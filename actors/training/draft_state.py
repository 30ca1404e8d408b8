"""State dicts of drafts: what is whose, and how one is put into a draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.actors.training.adapters import is_adapter


def tied_names(draft: Any) -> set[str]:
    """Names of the weights that are another's."""
    if not getattr(draft.config, "tie_word_embeddings", False):
        return set()
    return set(getattr(draft, "_tied_weights_keys", None) or ())


def load_state(draft: Any, state: Mapping[str, Tensor]) -> None:
    """Copy weights into a draft, in place.

    Raises:
        ValueError: for names that the draft lacks or shapes that differ.
    """
    own = {name: weight for name, weight in draft.state_dict().items() if not is_adapter(name)}
    tied = set(getattr(draft, "_tied_weights_keys", None) or ())
    missing = [name for name in own if name not in state and name not in tied]
    wrong = [n for n, new in state.items() if n not in own or own[n].shape != new.shape]
    if missing or wrong:
        raise ValueError(f"weights do not fit the draft: missing {missing}, wrong {wrong}")
    with torch.no_grad():
        for name, new in state.items():
            own[name].copy_(new)
