"""What a trainer is at, what it has seen of each topic, and why a round may end early."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.actors.training.topic_schedule import Rest


class Stopped(Exception):  # noqa: N818 - not an error: the trainer was told to end
    """Raised in the midst of a round, or of scoring, when the trainer ends."""


class Ousted(Exception):  # noqa: N818 - not an error: the trainer asks for another topic
    """Raised where the broker knows of no round of this trainer: it was restarted, or given up."""


class Unfit(Exception):  # noqa: N818 - not an error: other topics go on
    """Raised where a topic cannot be taught for now; says why."""


class Diverged(Exception):  # noqa: N818 - not an error: the candidate is given up
    """Raised where the training loss is no number any more."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the trainer is at; replaced whole, so that any thread may read it."""

    state: str = "starting"
    topic: str | None = None
    steps: int = 0
    micro_steps: int = 0
    training_s: float = 0.0
    loss: float | None = None
    rounds: int = 0
    published: int = 0
    rejected: int = 0


@dataclass(slots=True)
class Seen:
    """A topic's counters at its last round, and its rest after one that could not teach it."""

    inserted: int = 0
    ended_at: float = 0.0
    stable: int = 0
    rolled_back: int = 0  # candidates in a row, since that version
    rest: Rest = field(default_factory=Rest)
