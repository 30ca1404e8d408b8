"""Messages between a trainer and the scheduler that gives it topics and permits to compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from paceline.actors.handles import RemoteMethod
from paceline.actors.training.round_counts import RoundCounts

IDLE_WAIT_S = 2.0  # that a trainer waits for idle serving before it asks again

# Records that shards have counted, by topic and start of the shard: one that starts again counts
# from 0, and a trainer that takes a topic over may not have seen it do so.
InsertedByShard = Mapping[tuple[str, float], int]


@dataclass(frozen=True, slots=True)
class ResourceSlot:
    """A part of a node that one trainer at a time computes on.

    Attributes:
        name: unique in the cluster; the trainer's own name if Ray books the slot for it.
        node: Ray's node id, None if it is not known yet.
        amounts: resource to the amount that Ray books for the trainer until its process ends;
            empty if nothing is booked.
    """

    name: str
    node: str | None = None
    amounts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerIdentity:
    """A trainer as the scheduler knows it.

    Attributes:
        name: unique among trainers.
        slots: on any of which it may compute; empty for one slot of its own.
        sole: whether it is the only trainer: its memory of a topic is then never stale.
    """

    name: str = "paceline-trainer"
    slots: tuple[ResourceSlot, ...] = ()
    sole: bool = True


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """State of a topic at the end of a round, for the trainer that has the next one.

    Attributes:
        inserted: the topic's records at the beginning of the last round that moved weights, those
            of all topics for ``general``.
        counts: of its rounds.
        acceptance: expected acceptance of the served draft, None if it is not known.
        rate_share: share of the learning rate that its steps have.
    """

    inserted: InsertedByShard = field(default_factory=dict)
    counts: RoundCounts = field(default_factory=RoundCounts)
    acceptance: float | None = None
    rate_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """Answer to a trainer that requests a topic.

    Attributes:
        topic: assigned until the round ends; None if there is none now.
        stale: whether another trainer has trained it since this one did.
    """

    topic: str | None
    stale: bool = False


class Permit(StrEnum):
    """Answer to a trainer that asks to run a micro-step."""

    GRANTED = "granted"
    DENIED = "denied"  # retry later; the topic stays assigned
    UNASSIGNED = "unassigned"  # the scheduler knows no topic of this trainer: the round ends


class PermitHandle(Protocol):
    """Actor handle of the trainer scheduler, as far as trainers call it; see TrainerScheduler."""

    @property
    def may_train(self) -> RemoteMethod[[], bool]:
        """Whether one forward without a lease may run."""

    @property
    def until_idle(self) -> RemoteMethod[[float], None]:
        """Wait until training may go on, or for so many seconds."""

    @property
    def acquire_topic(
        self,
    ) -> RemoteMethod[[TrainerIdentity, str, Mapping[str, float]], Assignment]:
        """Acquire a topic, by identity, incarnation, and the topics' gains."""

    @property
    def topic_progress(self) -> RemoteMethod[[str], dict[str, TopicProgress]]:
        """Progress of the other trainers, by the caller's name."""

    @property
    def acquire_permit(self) -> RemoteMethod[[str, str], Permit]:
        """Acquire a permit, by name and incarnation."""

    @property
    def release_permit(self) -> RemoteMethod[[str, str], None]:
        """Release the permit, by name and incarnation."""

    @property
    def release_topic(self) -> RemoteMethod[[str, str, TopicProgress | None], None]:
        """End the round, by name and incarnation."""
