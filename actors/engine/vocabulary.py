"""Vocabularies padded to different sizes over one tokenizer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def known_ids(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Replace token ids beyond a model's vocabulary by 0.

    A draft's result for such a token changes no answer, only its acceptance.

    Args:
        token_ids: int64 of any shape.
        vocab_size: number of the model's embeddings.
    """
    return token_ids.masked_fill(token_ids >= vocab_size, 0)


def resize_logits(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut logits to another vocabulary size, or pad them with -inf (probability 0).

    Args:
        logits: float ``[..., V]``.
        vocab_size: W.

    Returns:
        ``[..., W]``; ``logits`` itself if W is V.
    """
    missing = vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[..., :vocab_size]
    return functional.pad(logits, (0, missing), value=-torch.inf)
