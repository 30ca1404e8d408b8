"""A running mean of the weights in training: what is judged and served in their stead.

At a constant learning rate the weights wander around what they would settle at. Their mean over
the last steps lies nearer to it, and there is no end of training at which a falling rate could
bring them there (Polyak and Juditsky, 1992; Izmailov et al., arXiv 1803.05407).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_STEPS = "steps"


class RunningMean:
    """Exponential moving average of some weights, in float32 beside them.

    After step t (from 1) the mean moves towards the weights by ``1 - min(decay, (1 + t) /
    (10 + t))``: a fresh mean forgets where it began within a few steps.
    """

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        """Start at the weights.

        Args:
            weights: those in training, any floating dtype; they are looked at, never kept.
            decay: share of the mean that a step keeps, in [0, 1); 0 is the weights themselves.
        """
        self._decay = decay
        self._steps = 0
        self._means = [weight.detach().float().clone() for weight in weights]

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor]) -> None:
        """Take the weights after an optimizer step."""
        self._steps += 1
        keep = min(self._decay, (1 + self._steps) / (10 + self._steps))
        now = [weight.detach().float() for weight in weights]
        torch._foreach_lerp_(self._means, now, 1.0 - keep)

    @contextmanager
    def in_place(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Have the weights hold the means, rounded to their dtype, until the block ends."""
        with torch.no_grad():
            kept = [weight.detach().clone() for weight in weights]
            for weight, mean in zip(weights, self._means, strict=True):
                weight.copy_(mean)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, old in zip(weights, kept, strict=True):
                    weight.copy_(old)

    def state(self) -> dict[str, Tensor]:
        """All that it consists of, for :meth:`resume`; the next update changes the means."""
        means = {str(number): mean for number, mean in enumerate(self._means)}
        return means | {_STEPS: torch.tensor(self._steps)}

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken, of weights of the same shapes."""
        self._steps = int(state[_STEPS])
        for number, mean in enumerate(self._means):
            mean.copy_(state[str(number)])

    def nbytes(self) -> int:
        """Memory of the means."""
        return sum(mean.nbytes for mean in self._means)
