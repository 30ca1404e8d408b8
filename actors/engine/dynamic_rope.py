"""Rotary embeddings with frequencies by the length of the text ("dynamic" NTK scaling).

transformers computes all positions of a prompt with the frequencies of the prompt's length, and
every later position with those of its own. Its module keeps one set of frequencies for all rows of
a forward; here every row has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

_GROWTH = 128  # positions
_MAX_TABLES = 8  # of long prompts in prefill


def dynamic_length(config: PreTrainedConfig) -> int | None:
    """Return the length up to which a dynamic rotary embedding is plain; None for other models.

    Args:
        config: transformers' config.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return int(config.max_position_embeddings) if rope.get("rope_type") == "dynamic" else None


class DynamicRotary(nn.Module):
    """Replaces a model's rotary module.

    Attributes:
        prompt_lengths: in tokens, per row of the next forward.
    """

    def __init__(self, own: nn.Module, length: int, capacity: int, like: Tensor) -> None:
        """Tabulate the angles of the model's own module.

        Args:
            own: transformers' module.
            length: up to which its frequencies are constant.
            capacity: positions per row.
            like: tensor of the model's dtype and device.
        """
        super().__init__()
        self.prompt_lengths: Sequence[int] = ()
        self._own = [own]  # in a list, so that it is not registered as a submodule
        self._length, self._capacity, self._like = length, capacity, like
        self._cos, self._sin = self._angles(torch.arange(min(length, capacity)))
        self._prompt_angles = lru_cache(_MAX_TABLES)(lambda n: self._angles(torch.arange(n)))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[B, T, dim]`` of ``[B, T]``, in the dtype of ``x``."""
        self._grow(int(position_ids.max()) + 1)
        cos, sin = self._cos[position_ids], self._sin[position_ids]
        for i, prompt in enumerate(self.prompt_lengths):
            if prompt > self._length and int(position_ids[i].min()) < prompt:
                inside = (position_ids[i] < prompt)[:, None]
                at = position_ids[i].clamp(max=prompt - 1)
                for part, table in zip((cos, sin), self._prompt_angles(prompt), strict=True):
                    part[i] = torch.where(inside, table[at], part[i])
        return cos.to(x.dtype), sin.to(x.dtype)

    def _grow(self, count: int) -> None:
        """Extend the table to ``count`` positions or more: each costs a call of the module."""
        built = len(self._cos)
        if count > built:
            ahead = range(built, min(max(count, built + _GROWTH), self._capacity))
            parts = [self._angles(torch.tensor([at])) for at in ahead]
            cos, sin = (torch.cat(part) for part in zip(*parts, strict=True))
            self._cos, self._sin = torch.cat((self._cos, cos)), torch.cat((self._sin, sin))

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the module's ``[T, dim]`` for a forward over these positions alone."""
        own, first = self._own[0], torch.zeros(1, 1, dtype=torch.int64, device=self._like.device)
        own(self._like, first)  # a short text resets the frequencies of a longer one
        cos, sin = own(self._like, positions.to(self._like.device)[None])
        return cos[0], sin[0]


def dynamic_rotaries(model: PreTrainedModel, capacity: int) -> list[DynamicRotary]:
    """Replace every rotary module of a dynamic model by a :class:`DynamicRotary`.

    Args:
        model: a causal LM.
        capacity: positions per row.
    """
    length = dynamic_length(model.config)
    if length is None:
        return []
    like, found = model.get_input_embeddings().weight, []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if getattr(child, "rope_type", None) == "dynamic":
                found.append(DynamicRotary(child, length, capacity, like))
                setattr(parent, name, found[-1])
    return found
