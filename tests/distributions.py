"""Counts against distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from scipy import stats


def chi_square(observed: dict[Any, int], distribution: dict[Any, float]) -> float:
    """p-value of counts against a distribution; outcomes of fewer than 5 expected are merged."""
    count = sum(observed.values())
    assert set(observed) <= set(distribution), "an outcome of probability 0 was drawn"
    large = [o for o, p in distribution.items() if p * count >= 5]
    f_obs = [observed.get(o, 0) for o in large]
    f_exp = [distribution[o] * count for o in large]
    rest = 1 - sum(distribution[o] for o in large)
    if rest * count >= 1e-3:
        f_obs.append(count - sum(f_obs))
        f_exp.append(rest * count)
    return float(stats.chisquare(f_obs, f_exp, sum_check=False).pvalue)


def target_probs(
    model: Any,
    tokens: Sequence[int],
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> dict[int, float]:
    """The probability of every next token that may follow, by the definition of the filters."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens)])).logits[0, -1].double()
    probs = torch.softmax(logits / temperature, -1)
    ordered, order = probs.sort(descending=True)
    ordered[top_k or len(ordered) :] = 0
    ordered /= ordered.sum()
    ordered[ordered.cumsum(0) - ordered >= top_p] = 0
    ordered[ordered < min_p * ordered[0]] = 0
    ordered /= ordered.sum()
    return {int(i): float(p) for i, p in zip(order, ordered, strict=True) if p > 0}


def law_of_tokens(
    model: Any, prompt: Sequence[int], length: int, *sampling: float, **filters: Any
) -> dict[tuple[int, ...], float]:
    """The joint probability of the first ``length`` tokens of an answer, see target_probs."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        law = {
            (*before, token): mass * p
            for before, mass in law.items()
            for token, p in target_probs(model, [*prompt, *before], *sampling, **filters).items()
        }
    return law
