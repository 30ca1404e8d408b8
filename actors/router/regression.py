"""Logistic regression with offsets, sample weights and a ridge. Pure.

It fits one row beside a classifier's present ones: with f the features of a text and z its
present logits, (w, b) of sigmoid(w . f + b - logsumexp(z)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, logsumexp

Doubles = NDArray[np.float64]

_PRECISION = {"ftol": 1e-13, "gtol": 1e-8, "maxiter": 2_000, "maxfun": 10_000}


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
        return -np.asarray(logsumexp(self.logits, axis=1))


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
    found = _minimum(design, data.offsets[chosen], *classes, ridge)
    weight = found[:-1] / scale
    return ClassifierRow(weight, float(found[-1] - mean @ weight))


def _minimum(
    design: Doubles, offsets: Doubles, targets: Doubles, weights: Doubles, ridge: float
) -> Doubles:
    """The minimum of the weighted logistic loss plus ``ridge / 2 * |w|^2``, without the bias."""
    penalty = np.full(design.shape[1], ridge)
    penalty[-1] = 1e-9  # an outlier's bias stays finite
    signs = 2.0 * targets - 1.0

    def loss_and_slope(point: Doubles) -> tuple[float, Doubles]:
        margins = design @ point + offsets
        losses = weights * np.logaddexp(0.0, -signs * margins)
        slope = design.T @ (weights * (expit(margins) - targets)) + penalty * point
        return float(losses.sum() + penalty @ (point**2) / 2), slope

    start = np.zeros(design.shape[1])
    start[-1] = -float(weights @ offsets)
    found = minimize(loss_and_slope, start, jac=True, method="L-BFGS-B", options=_PRECISION)
    return np.asarray(found.x)
