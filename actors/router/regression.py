"""A logistic regression with offsets, weights and a ridge, by Newton's method. Pure.

It learns one row beside a classifier's present ones: with f the features of a text and z its
present logits, (w, b) of sigmoid(w . f + b - logsumexp(z)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

_NEWTON_STEPS = 40
_HALVINGS = 30
_CONVERGED = 1e-9


@dataclass(frozen=True, slots=True)
class Texts:
    """What the classifier makes of N texts.

    Attributes:
        features: float64 ``[N, H]``.
        logits: float64 ``[N, L]``, of the present labels.
    """

    features: Doubles
    logits: Doubles

    def offsets(self) -> Doubles:
        """-logsumexp of the logits, ``[N]``."""
        highest = self.logits.max(axis=1)
        sums: Doubles = np.exp(self.logits - highest[:, None]).sum(axis=1)
        return np.asarray(-(highest + np.log(sums)))


@dataclass(frozen=True, slots=True)
class Row:
    """A classifier's row: ``weight`` float64 ``[H]`` and its bias."""

    weight: Doubles
    bias: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Examples, then the others.

    Attributes:
        features: float64 ``[N, H]``.
        logits: float64 ``[N, L]``, of the present labels.
        offsets: float64 ``[N]``, see Texts.
        targets: float64 ``[N]``: 1 of examples, 0 of the others.
        share: of the loss that the examples have.
    """

    features: Doubles
    logits: Doubles
    offsets: Doubles
    targets: Doubles
    share: float

    @classmethod
    def of(cls, examples: Texts, others: Texts, share: float) -> Problem:
        """From both kinds."""
        return cls(
            np.concatenate([examples.features, others.features]),
            np.concatenate([examples.logits, others.logits]),
            np.concatenate([examples.offsets(), others.offsets()]),
            np.repeat([1.0, 0.0], [len(examples.features), len(others.features)]),
            share,
        )

    def weights(self, chosen: NDArray[np.bool_]) -> Doubles:
        """Of the chosen prompts in the loss; they sum to 1."""
        targets = self.targets[chosen]
        own, rest = targets.sum(), (1.0 - targets).sum()
        return np.asarray(np.where(targets == 1.0, self.share / own, (1.0 - self.share) / rest))


def spread(targets: Doubles, folds: int, seed: int) -> NDArray[np.int64]:
    """The fold of every prompt, int64 ``[N]``; each kind is spread evenly over them."""
    rng = np.random.default_rng(seed)
    found = np.zeros(len(targets), np.int64)
    for kind in (0.0, 1.0):
        places = rng.permutation(np.flatnonzero(targets == kind))
        found[places] = np.arange(len(places)) % folds
    return found


def held_out(problem: Problem, folds: NDArray[np.int64], ridge: float) -> Doubles:
    """Per prompt the margin that a row gives it which was learnt without its fold."""
    margins = np.zeros(len(folds))
    for fold in range(int(folds.max()) + 1):
        out = folds == fold
        row = fitted(problem, ~out, ridge)
        margins[out] = problem.features[out] @ row.weight + row.bias + problem.offsets[out]
    return margins


def likelihood(problem: Problem, margins: Doubles) -> float:
    """Mean log-likelihood of the kinds, by the margins ``[N]`` that the prompts got."""
    signed = np.where(problem.targets == 1.0, margins, -margins)
    weights = problem.weights(np.ones(len(signed), bool))
    return -float((weights * np.logaddexp(0.0, -signed)).sum())


def fitted(problem: Problem, chosen: NDArray[np.bool_], ridge: float) -> Row:
    """The row that the chosen prompts give."""
    features = problem.features[chosen]
    mean, scale = features.mean(axis=0), features.std(axis=0) + 1e-6
    design = np.concatenate([(features - mean) / scale, np.ones((len(features), 1))], axis=1)
    kinds = problem.targets[chosen], problem.weights(chosen)
    found = _newton(design, problem.offsets[chosen], *kinds, ridge)
    weight = found[:-1] / scale
    return Row(weight, float(found[-1] - mean @ weight))


def _newton(
    design: Doubles, offsets: Doubles, targets: Doubles, weights: Doubles, ridge: float
) -> Doubles:
    """Minimise the weighted logistic loss plus ``ridge / 2 * |w|^2``; the bias goes free."""
    penalty = np.full(design.shape[1], ridge)
    penalty[-1] = 1e-9  # nothing but a solvable system
    signs = 2.0 * targets - 1.0

    def loss(point: Doubles) -> float:
        margins = signs * (design @ point + offsets)
        return float((weights * np.logaddexp(0.0, -margins)).sum() + penalty @ (point**2) / 2)

    point = np.zeros(design.shape[1])
    point[-1] = -float(weights @ offsets)  # between the two kinds
    present = loss(point)
    for _ in range(_NEWTON_STEPS):
        chances = sigmoid(design @ point + offsets)
        slope = design.T @ (weights * (chances - targets)) + penalty * point
        curve = (design * (weights * chances * (1.0 - chances))[:, None]).T @ design
        step = np.linalg.solve(curve + np.diag(penalty + 1e-12), slope)
        for halving in range(_HALVINGS):
            tried = point - step * 0.5**halving
            reached = loss(tried)
            if reached <= present:
                break
        else:
            break
        gained, point, present = present - reached, tried, reached
        if gained < _CONVERGED or not math.isfinite(present):
            break
    return point


def sigmoid(x: Doubles) -> Doubles:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))
