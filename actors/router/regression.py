"""Logistic regression with offsets, sample weights and a ridge, by Newton's method. Pure.

It fits one row beside a classifier's present ones: with f the features of a text and z its
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
class ClassifiedTexts:
    """Features and logits of N texts.

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
class ClassifierRow:
    """A row of a classifier: ``weight`` float64 ``[H]`` and its bias."""

    weight: Doubles
    bias: float


@dataclass(frozen=True, slots=True)
class RegressionData:
    """ClassifiedTexts of both classes: examples of the new topic, then other prompts.

    Attributes:
        features: float64 ``[N, H]``.
        logits: float64 ``[N, L]``, of the present labels.
        offsets: float64 ``[N]``, see ClassifiedTexts.
        targets: float64 ``[N]``: 1 for examples, 0 for the others.
        share: of the loss, for the examples.
    """

    features: Doubles
    logits: Doubles
    offsets: Doubles
    targets: Doubles
    share: float

    @classmethod
    def of(cls, examples: ClassifiedTexts, others: ClassifiedTexts, share: float) -> RegressionData:
        return cls(
            np.concatenate([examples.features, others.features]),
            np.concatenate([examples.logits, others.logits]),
            np.concatenate([examples.offsets(), others.offsets()]),
            np.repeat([1.0, 0.0], [len(examples.features), len(others.features)]),
            share,
        )

    def weights(self, chosen: NDArray[np.bool_]) -> Doubles:
        """Sample weights of the chosen texts, ``[chosen]``; they sum to 1."""
        targets = self.targets[chosen]
        own, rest = targets.sum(), (1.0 - targets).sum()
        return np.asarray(np.where(targets == 1.0, self.share / own, (1.0 - self.share) / rest))


def assign_folds(targets: Doubles, folds: int, seed: int) -> NDArray[np.int64]:
    """The fold of every text, int64 ``[N]``, stratified by class."""
    rng = np.random.default_rng(seed)
    found = np.zeros(len(targets), np.int64)
    for target in (0.0, 1.0):
        places = rng.permutation(np.flatnonzero(targets == target))
        found[places] = np.arange(len(places)) % folds
    return found


def cross_validate(data: RegressionData, folds: NDArray[np.int64], ridge: float) -> Doubles:
    """Margins ``[N]`` of all texts, each by a row fitted without the text's fold."""
    margins = np.zeros(len(folds))
    for fold in range(int(folds.max()) + 1):
        out = folds == fold
        row = fit_row(data, ~out, ridge)
        margins[out] = data.features[out] @ row.weight + row.bias + data.offsets[out]
    return margins


def log_likelihood(data: RegressionData, margins: Doubles) -> float:
    """Weighted mean log-likelihood of the classes, given margins ``[N]``."""
    signed = np.where(data.targets == 1.0, margins, -margins)
    weights = data.weights(np.ones(len(signed), bool))
    return -float((weights * np.logaddexp(0.0, -signed)).sum())


def fit_row(data: RegressionData, chosen: NDArray[np.bool_], ridge: float) -> ClassifierRow:
    """Fit a row to the chosen texts."""
    features = data.features[chosen]
    mean, scale = features.mean(axis=0), features.std(axis=0) + 1e-6
    design = np.concatenate([(features - mean) / scale, np.ones((len(features), 1))], axis=1)
    classes = data.targets[chosen], data.weights(chosen)
    found = _newton(design, data.offsets[chosen], *classes, ridge)
    weight = found[:-1] / scale
    return ClassifierRow(weight, float(found[-1] - mean @ weight))


def _newton(
    design: Doubles, offsets: Doubles, targets: Doubles, weights: Doubles, ridge: float
) -> Doubles:
    """Minimise the weighted logistic loss plus ``ridge / 2 * |w|^2``; the bias has no ridge."""
    penalty = np.full(design.shape[1], ridge)
    penalty[-1] = 1e-9  # for a regular system
    signs = 2.0 * targets - 1.0

    def loss(point: Doubles) -> float:
        margins = signs * (design @ point + offsets)
        return float((weights * np.logaddexp(0.0, -margins)).sum() + penalty @ (point**2) / 2)

    point = np.zeros(design.shape[1])
    point[-1] = -float(weights @ offsets)
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
