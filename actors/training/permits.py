"""How a trainer gets its topics and its leave to compute from the broker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who a trainer is to the broker; plain data that crosses process borders.

    Attributes:
        name: of its own among the trainers.
        fractions: that it may compute on, in the broker's words; none is one of its own.
        alone: whether there is no other trainer: what it has learnt is then always the last.
    """

    name: str = "paceline-trainer"
    fractions: Sequence[Any] = ()
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Note:
    """What a trainer tells at a round's end to whoever has the topic next.

    Attributes:
        inserted: the topic's records so far at the round's beginning.
        rejections: rounds in a row without a gain.
        fruitless: rounds in a row, the last ones, without hope of one.
        acceptance: expected acceptance of the served draft, None where it is not known.
        rate_share: share of the learning rate that its steps have.
        rolled_back: candidates of the stable version that live requests did not like, in a row.
    """

    inserted: int = 0
    rejections: int = 0
    fruitless: int = 0
    acceptance: float | None = None
    rate_share: float = 1.0
    rolled_back: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """The broker's answer to a trainer that wants a topic.

    Attributes:
        topic: that is its own until the round ends; None: none now.
        anew: whether another trainer has had it since: this one's memory of it is stale.
    """

    topic: str | None
    anew: bool = False
