"""Words of the broker: fractions of the cluster, leases on them, and what it instructs.

A trainer is *assigned* a topic for a round, and holds a *lease* on a fraction for as long as it
computes for it: a lease ends when serving wants the processor, an assignment when the round does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Fraction:
    """A part of a node that one trainer at a time computes on.

    Attributes:
        name: of its own in the cluster.
        node: that it is on.
        amounts: resource to what Ray books for the trainer on it, and gives to nobody else before
            that trainer's process has ended. Nothing where nothing is booked.
    """

    name: str
    node: str
    amounts: Mapping[str, float] = field(default_factory=dict)


class Ending(StrEnum):
    """How a lease ended."""

    RELEASED = "released"  # the trainer needed it no more
    REVOKED = "revoked"  # it was told to yield, and did
    KILLED = "killed"  # it did not in time
    FREED = "freed"  # its process ended for a replica that needs the room
    DIED = "died"  # it ended by itself


@dataclass(slots=True)
class Lease:
    """A trainer's right to compute, from a grant to an ending; times in monotonic seconds.

    Attributes:
        trainer: that has it.
        fraction: that it is for.
        topic: that is learnt.
        granted_at: when it began.
        renewed_at: the trainer's last sign between two micro-steps.
        revoked_at: since when it is to yield, None where it is not.
    """

    trainer: str
    fraction: Fraction
    topic: str
    granted_at: float
    renewed_at: float
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """How the broker deals with trainers.

    Attributes:
        yield_timeout_s: from a revocation to the killing of a trainer that goes on.
        leave_timeout_s: the same, at most, where a replica waits for the trainer's room.
        most_patience: how many times as long a trainer is waited for at most that was killed
            before: each time in a row doubles it. A micro-step may be as slow as that.
        silent_after_s: a trainer that works, or is in the midst of a round, and gives no sign for
            so long loses lease and topic.
        ageing_s: waiting that doubles a topic's weight.
        longest_wait_s: a topic that has waited for so long comes before all that have not.
        away: weight of a topic that another trainer had last, which would start it anew here.
        pending_stale_s: what was said of waiting replicas holds for so long.
        settle_s: until Ray's figures show what an ended trainer has left.
        return_after_s: from the last waiting replica to a freed trainer's return.
    """

    yield_timeout_s: float = 2.0
    leave_timeout_s: float = 2.0
    most_patience: float = 32.0
    silent_after_s: float = 120.0
    ageing_s: float = 60.0
    longest_wait_s: float = 600.0
    away: float = 0.5
    pending_stale_s: float = 15.0
    settle_s: float = 3.0
    return_after_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Assign:
    """The trainer's topic is this one from now on.

    ``anew``: what the trainer has of it in memory is not the last that was learnt.
    """

    trainer: str
    topic: str
    anew: bool


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease begins: the trainer may compute."""

    trainer: str
    topic: str
    fraction: str


@dataclass(frozen=True, slots=True)
class Renew:
    """The lease goes on: one more micro-step."""

    trainer: str


@dataclass(frozen=True, slots=True)
class Wait:
    """No micro-step now; ask again."""

    trainer: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The broker knows of no topic of this trainer: it ends its round and asks for one."""

    trainer: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """The trainer is to yield now: its next question is answered by Wait."""

    trainer: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the trainer's process; Ray starts it again on the same fraction."""

    trainer: str


@dataclass(frozen=True, slots=True)
class Free:
    """End the trainer for good: a replica needs what is booked for it."""

    trainer: str


@dataclass(frozen=True, slots=True)
class Place:
    """Start a freed trainer again: there is room."""

    trainer: str


Instruction = Assign | Grant | Renew | Wait | Stop | Revoke | Kill | Free | Place
