"""A model with its key/value rows: one forward over a ragged batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.actors.decoding.attention import StepContext
from paceline.actors.decoding.kv import KVRows


def kv_shapes(config: Any) -> list[tuple[int, int]]:
    """Per layer (key/value heads, head dimension) from a transformers config."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [(kv_heads, dim)] * config.num_hidden_layers


class ModelRunner:
    """Runs one model for up to ``rows`` requests at once."""

    def __init__(self, model: Any, rows: int, max_model_len: int) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.max_model_len = max_model_len
        self.kv = KVRows(kv_shapes(model.config), rows, max_model_len, model.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[int], token_ids: Tensor, positions: Tensor, span: int, keep: int = 0
    ) -> Tensor:
        """Compute T new tokens of B rows and store their keys and values.

        Args:
            rows: the rows, B of them.
            token_ids: int64 ``[B, T]``.
            positions: int64 ``[B, T]``, position of every token in its sequence.
            span: 1 + the largest position that any row reads.
            keep: logits of the last ``keep`` tokens only; 0 is all.

        Returns:
            logits ``[B, T or keep, V]`` in the model's dtype.
        """
        # Padding behind a short row may overhang the context. Nobody reads its last position
        # before the request has ended, so that is where the padding goes.
        positions = positions.clamp(max=self.max_model_len - 1)
        span = min(span, self.max_model_len)
        first = rows[0]
        follows = all(row == first + i for i, row in enumerate(rows))
        context = StepContext(
            kv=self.kv,
            rows=torch.tensor(rows, dtype=torch.int64, device=self.device),
            positions=positions,
            span=span,
            contiguous=(first, len(rows)) if follows else None,
        )
        output = self.model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            paceline_step=context,
        )
        logits: Tensor = output.logits
        return logits

    def prefill(self, row: int, token_ids: Sequence[int], start: int) -> None:
        """Store keys and values of consecutive tokens of one row, from position ``start``."""
        if not token_ids:
            return
        tokens = torch.tensor([list(token_ids)], dtype=torch.int64, device=self.device)
        end = start + len(token_ids)
        positions = torch.arange(start, end, device=self.device)[None]
        self.forward([row], tokens, positions, span=end, keep=1)

    @torch.inference_mode()
    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Copy new weights over the present ones, in place.

        Raises:
            ValueError: where a name or shape differs; nothing has been copied then.
        """
        own = self.model.state_dict()
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
        missing = [name for name in own if name not in state and name not in tied]
        unknown = [name for name in state if name not in own]
        if missing or unknown:
            raise ValueError(f"weights differ in names: missing {missing}, unknown {unknown}")
        wrong = [name for name, new in state.items() if new.shape != own[name].shape]
        if wrong:
            raise ValueError(f"weights differ in shape: {wrong}")
        for name, new in state.items():
            own[name].copy_(new)
