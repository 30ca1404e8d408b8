"""Drafts whose vocabulary is padded to another size than the target's, over one tokenizer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def known_ids(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Token ids that a model can embed: 0 in place of those beyond its vocabulary.

    What a draft makes of such a token changes no answer, only how much of its draft is accepted.

    Args:
        token_ids: int64 of any shape.
        vocab_size: embeddings that the model has.
    """
    return token_ids.masked_fill(token_ids >= vocab_size, 0)


def resize_logits(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits over another number of tokens: cut, or -inf (probability 0) where there are none.

    Args:
        logits: float ``[..., V]``.
        vocab_size: W.

    Returns:
        ``[..., W]``; ``logits`` itself where W is V.
    """
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    return functional.pad(logits, (0, missing), value=-torch.inf)
