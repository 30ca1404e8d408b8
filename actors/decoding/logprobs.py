"""Log-probabilities of emitted tokens, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.actors.decoding.request import TokenLogprob


@torch.inference_mode()
def token_logprobs(
    logits: Tensor, emitted: Sequence[Sequence[int]], wanted: Sequence[int | None]
) -> list[list[TokenLogprob]]:
    """What the target said of a round's tokens: its own softmax, before any rule or filter.

    Args:
        logits: float ``[B, k + 1, V]``, the target's as they came.
        emitted: per row the tokens that the round added, at most k + 1.
        wanted: per row the number of alternatives, None where nothing is asked.

    Returns:
        per row an entry per emitted token, empty where nothing is asked.
    """
    at = [
        (row, step, token)
        for row, tokens in enumerate(emitted)
        if wanted[row] is not None
        for step, token in enumerate(tokens)
    ]
    answers: list[list[TokenLogprob]] = [[] for _ in emitted]
    if not at:
        return answers
    rows, steps, tokens = torch.tensor(at, device=logits.device).T
    laws = torch.log_softmax(logits[rows, steps].float(), dim=-1)
    own = laws.gather(-1, tokens[:, None])[:, 0].tolist()
    size = min(max(n for n in wanted if n is not None), laws.shape[-1])
    values, ids = laws.topk(size, dim=-1)
    for (row, _, _), logprob, top in zip(
        at, own, zip(ids.tolist(), values.tolist(), strict=True), strict=True
    ):
        best = tuple(zip(*top, strict=True))[: wanted[row]]
        answers[row].append(TokenLogprob(logprob, best))
    return answers
