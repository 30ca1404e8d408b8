"""Fit a classifier row for a new topic from examples, and measure it. Pure.

The model and its present rows stay as they are: with f the model's features of a text and z its
present logits, a new row gives the new topic the probability

    p(new | text) = sigmoid(w . f + b - logsumexp(z)),  a softmax over z and w . f + b,

and the others keep their proportions among each other. So only (w, b) is fitted: a logistic
regression with the offset -logsumexp(z) and a ridge on w (features standardised), of examples
against other prompts, which weigh more (a wrong expert costs more than a right one gains).

The row is measured by cross-validation. The ridge is chosen by the same held-out likelihood, which
makes it look slightly too good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
from scipy.special import expit

from paceline.actors.general import GENERAL
from paceline.actors.router.policy import MinConfidence, choose_topic
from paceline.actors.router.regression import (
    ClassifiedTexts,
    ClassifierRow,
    Doubles,
    RegressionData,
    assign_folds,
    cross_validate,
    fit_row,
    log_likelihood,
)


@dataclass(frozen=True, slots=True)
class TopicFitSettings:
    """Fit of a row, and the accuracy that it needs.

    Attributes:
        min_examples: least number of different examples.
        folds: of the cross-validation.
        ridges: on the weights, per unit of mean loss; the best is chosen.
        share: of the loss, for the examples; the other prompts have the rest.
        min_recall: least share of held-out examples classified as the new topic.
        max_moved: largest share of held-out prompts whose topic may change, of all present topics
            and of each one.
        min_prompts: of a topic, to apply max_moved to it alone.
        min_confidence: see `policy.choose_topic`.
        seed: of the folds.
    """

    min_examples: int = 12
    folds: int = 5
    ridges: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)
    share: float = 0.25
    min_recall: float = 0.7
    max_moved: float = 0.1
    min_prompts: int = 10
    min_confidence: MinConfidence = 0.5
    seed: int = 0


class TopicFitFigures(TypedDict):
    """Figures of a new row on held-out prompts, see TopicFit."""

    recall: float
    moved: float
    moved_by_topic: dict[str, float]
    prompts_by_topic: dict[str, int]
    examples_before: dict[str, int]
    ridge: float


@dataclass(frozen=True, slots=True)
class TopicFit:
    """A new row and its figures on held-out prompts.

    Attributes:
        row: fitted to all prompts.
        recall: share of the examples classified as the new topic.
        moved: share of the present prompts whose topic changes.
        moved_by_topic: the same by topic before, of topics with prompts.
        prompts_by_topic: number of prompts by topic before.
        before: number of examples by topic before.
        ridge: the chosen one.
    """

    row: ClassifierRow
    recall: float
    moved: float
    moved_by_topic: dict[str, float]
    prompts_by_topic: dict[str, int]
    before: dict[str, int] = field(default_factory=dict)
    ridge: float = 0.0

    def rejection(self, settings: TopicFitSettings) -> str | None:
        """Why the row must not be used; None if it may."""
        moved = {
            f"{topic}'s": share
            for topic, share in self.moved_by_topic.items()
            if self.prompts_by_topic[topic] >= settings.min_prompts
        }
        moved["all topics'"] = self.moved
        worst = max(moved, key=lambda name: moved[name])
        if self.recall < settings.min_recall:
            return (
                f"only {self.recall:.0%} of held-out examples are separated from other prompts "
                f"({settings.min_recall:.0%} are needed)"
            )
        if moved[worst] > settings.max_moved:
            return (
                f"{moved[worst]:.0%} of {worst} held-out prompts would change their topic "
                f"(at most {settings.max_moved:.0%} may)"
            )
        return None

    def figures(self) -> TopicFitFigures:
        """The figures without the row."""
        return {
            "recall": self.recall,
            "moved": self.moved,
            "moved_by_topic": dict(self.moved_by_topic),
            "prompts_by_topic": dict(self.prompts_by_topic),
            "examples_before": dict(self.before),
            "ridge": self.ridge,
        }


def fit_topic(
    topic: str,
    examples: ClassifiedTexts,
    others: ClassifiedTexts,
    labels: Sequence[str],
    experts: Collection[str],
    settings: TopicFitSettings,
) -> TopicFit:
    """Fit a topic's row and measure it.

    Args:
        topic: the new one.
        examples: prompts of it.
        others: prompts whose topic should not change.
        labels: of the present logits.
        experts: present topics; other labels count as ``general``.
        settings: see TopicFitSettings.

    Raises:
        ValueError: too few prompts of either kind.
    """
    for kind, texts in (("examples", examples), ("other prompts", others)):
        if len(texts.features) < settings.folds:
            raise ValueError(f"{topic}: {len(texts.features)} {kind} are too few")
    data = RegressionData.of(examples, others, settings.share)
    folds = assign_folds(data.targets, settings.folds, settings.seed)
    margins = {ridge: cross_validate(data, folds, ridge) for ridge in settings.ridges}
    ridge = max(settings.ridges, key=lambda r: log_likelihood(data, margins[r]))
    rule = _TopicRule(topic, labels, experts, settings.min_confidence)
    row = fit_row(data, np.ones(len(data.targets), bool), ridge)
    return _measure(row, data, margins[ridge], rule, ridge)


def _measure(
    row: ClassifierRow, data: RegressionData, margins: Doubles, rule: _TopicRule, ridge: float
) -> TopicFit:
    """The row with its figures by held-out margins."""
    count = int(data.targets.sum())
    before = [rule.before(logits) for logits in data.logits]
    after = [rule.after(*pair) for pair in zip(data.logits, margins.tolist(), strict=True)]
    stayed = Counter(before[count:])
    pairs = zip(before[count:], after[count:], strict=True)
    left = Counter(old for old, new in pairs if old != new)
    return TopicFit(
        row=row,
        recall=after[:count].count(rule.topic) / count,
        moved=left.total() / stayed.total(),
        moved_by_topic={name: left[name] / stayed[name] for name in sorted(stayed)},
        prompts_by_topic=dict(sorted(stayed.items())),
        before=dict(sorted(Counter(before[:count]).items())),
        ridge=ridge,
    )


@dataclass(frozen=True, slots=True)
class _TopicRule:
    """Topics of prompts, by the rule of serving."""

    topic: str
    labels: Sequence[str]
    experts: Collection[str]
    min_confidence: MinConfidence

    def before(self, logits: Doubles) -> str:
        """Topic without the new row."""
        return choose_topic(self._shares(logits), {*self.experts, GENERAL}, self.min_confidence)

    def after(self, logits: Doubles, margin: float) -> str:
        """Topic with the new row; ``margin`` is its logit minus the logsumexp of the others.

        A topic that is a label of the model keeps the model's row (`TopicClassifier.set_head`):
        all that changes is that the topic has an expert.
        """
        names = {*self.experts, GENERAL, self.topic}
        if self.topic in self.labels:
            return choose_topic(self._shares(logits), names, self.min_confidence)
        new = float(expit(margin))
        shares = {name: p * (1 - new) for name, p in self._shares(logits).items()}
        return choose_topic(shares | {self.topic: new}, names, self.min_confidence)

    def _shares(self, logits: Doubles) -> dict[str, float]:
        exp = np.exp(logits - logits.max())
        return dict(zip(self.labels, (exp / exp.sum()).tolist(), strict=True))
