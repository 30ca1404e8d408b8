"""A further row for the topic classifier, learnt from examples. Pure.

The model and the rows that there are stay as they are: with f the model's features of a text and
z its present logits, a new row gives the new topic the probability

    p(new | text) = sigmoid(w . f + b - logsumexp(z)),  a softmax over z and w . f + b,

and the others keep their proportions among each other. So only (w, b) is learnt: a logistic
regression with the offset -logsumexp(z), examples against prompts that shall stay where they are,
which weigh more (a wrong expert costs more than a right one gains), with a ridge on w (features
standardised): ``regression.py``.

What comes of it is measured by cross-validation: every prompt is judged by a row that was learnt
without it. The ridge is chosen by the same held-out likelihood, which flatters it a little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.actors.router.policy import GENERAL, LeastConfidence, choose
from paceline.actors.router.regression import (
    Doubles,
    Problem,
    Row,
    Texts,
    fitted,
    held_out,
    likelihood,
    sigmoid,
    spread,
)


@dataclass(frozen=True, slots=True)
class GrowthSettings:
    """How a row is learnt, and what it must show.

    Attributes:
        min_examples: different ones, at least.
        folds: of the cross-validation.
        ridges: on the weights, per unit of mean loss; the best is taken.
        share: of the loss that the examples have; the other prompts have the rest.
        min_recall: share of held-out examples that must go to the new topic.
        max_moved: share of the held-out prompts of all present topics, and of any one, that may
            change theirs.
        min_prompts: of a topic, to go by it alone.
        min_confidence: see `policy.choose`.
        seed: of the folds.
    """

    min_examples: int = 12
    folds: int = 5
    ridges: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)
    share: float = 0.25
    min_recall: float = 0.7
    max_moved: float = 0.1
    min_prompts: int = 10
    min_confidence: LeastConfidence = 0.5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Growth:
    """A new row and what was measured of it, all on prompts that it was not learnt from.

    Attributes:
        row: learnt from all prompts.
        recall: share of the examples that go to the new topic.
        moved: share of the present prompts whose topic changes.
        moved_by_topic: the same by their topic before, of topics with prompts.
        prompts_by_topic: how many these were.
        before: where the examples went before, by topic.
        ridge: that was taken.
    """

    row: Row
    recall: float
    moved: float
    moved_by_topic: dict[str, float]
    prompts_by_topic: dict[str, int]
    before: dict[str, int] = field(default_factory=dict)
    ridge: float = 0.0

    def fault(self, settings: GrowthSettings) -> str | None:
        """Why the row must not be used, in words; None where it may."""
        moved = {
            f"{topic}'s": share
            for topic, share in self.moved_by_topic.items()
            if self.prompts_by_topic[topic] >= settings.min_prompts
        }
        moved["all topics'"] = self.moved
        worst = max(moved, key=lambda whose: moved[whose])
        if self.recall < settings.min_recall:
            return (
                f"only {self.recall:.0%} of held-out examples are told apart from other prompts "
                f"({settings.min_recall:.0%} are needed)"
            )
        if moved[worst] > settings.max_moved:
            return (
                f"{moved[worst]:.0%} of {worst} held-out prompts would change their topic "
                f"(at most {settings.max_moved:.0%} may)"
            )
        return None

    def figures(self) -> dict[str, Any]:
        """What was measured, as plain data."""
        return {
            "recall": self.recall,
            "moved": self.moved,
            "moved_by_topic": dict(self.moved_by_topic),
            "prompts_by_topic": dict(self.prompts_by_topic),
            "examples_before": dict(self.before),
            "ridge": self.ridge,
        }


def grow(
    topic: str,
    examples: Texts,
    others: Texts,
    labels: Sequence[str],
    experts: Collection[str],
    settings: GrowthSettings,
) -> Growth:
    """Learn a topic's row.

    Args:
        topic: the new one.
        examples: prompts of it.
        others: prompts that shall stay where they are.
        labels: of the present logits.
        experts: topics that are served now; others count as ``general``.
        settings: see GrowthSettings.

    Raises:
        ValueError: too few prompts of either kind.
    """
    for kind, texts in (("examples", examples), ("other prompts", others)):
        if len(texts.features) < settings.folds:
            raise ValueError(f"{topic}: {len(texts.features)} {kind} are too few")
    problem = Problem.of(examples, others, settings.share)
    folds = spread(problem.targets, settings.folds, settings.seed)
    margins = {ridge: held_out(problem, folds, ridge) for ridge in settings.ridges}
    ridge = max(settings.ridges, key=lambda r: likelihood(problem, margins[r]))
    judge = _Judge(topic, labels, experts, settings.min_confidence)
    row = fitted(problem, np.ones(len(problem.targets), bool), ridge)
    return _measured(row, problem, margins[ridge], judge, ridge)


def _measured(row: Row, problem: Problem, margins: Doubles, judge: _Judge, ridge: float) -> Growth:
    """The row with what held-out margins say of it."""
    count = int(problem.targets.sum())
    before = [judge.before(logits) for logits in problem.logits]
    after = [judge.after(*pair) for pair in zip(problem.logits, margins.tolist(), strict=True)]
    stayed = Counter(before[count:])
    pairs = zip(before[count:], after[count:], strict=True)
    left = Counter(old for old, new in pairs if old != new)
    return Growth(
        row=row,
        recall=after[:count].count(judge.topic) / count,
        moved=left.total() / stayed.total(),
        moved_by_topic={name: left[name] / stayed[name] for name in sorted(stayed)},
        prompts_by_topic=dict(sorted(stayed.items())),
        before=dict(sorted(Counter(before[:count]).items())),
        ridge=ridge,
    )


@dataclass(frozen=True, slots=True)
class _Judge:
    """Topics of prompts as the front door finds them."""

    topic: str
    labels: Sequence[str]
    experts: Collection[str]
    min_confidence: LeastConfidence

    def before(self, logits: Doubles) -> str:
        """Without the new row."""
        return choose(self._shares(logits), {*self.experts, GENERAL}, self.min_confidence)

    def after(self, logits: Doubles, margin: float) -> str:
        """With it; ``margin`` is its logit less the logsumexp of the others.

        A topic that there is a label for is left to that (`TopicClassifier.take`): the row is
        not used, and all that changes is that the topic has an expert.
        """
        everyone = {*self.experts, GENERAL, self.topic}
        if self.topic in self.labels:
            return choose(self._shares(logits), everyone, self.min_confidence)
        new = sigmoid(np.array([margin]))[0]
        shares = {name: p * (1 - new) for name, p in self._shares(logits).items()}
        return choose(shares | {self.topic: float(new)}, everyone, self.min_confidence)

    def _shares(self, logits: Doubles) -> dict[str, float]:
        exp = np.exp(logits - logits.max())
        return dict(zip(self.labels, (exp / exp.sum()).tolist(), strict=True))
