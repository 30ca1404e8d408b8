"""Status of a trainer, early ends of a round, and the wait for a permit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.actors.backoff import Backoff

_LONGEST_POLL_S = 0.1  # gaps of a busy hour are short, and all that there is then
_POLL_GROWTH = 17 / 16  # so that the delay stays a sixteenth of the wait


class Stopped(Exception):  # noqa: N818 - not an error: the process ends
    """Raised in the midst of a round, or of scoring, when the trainer ends."""


class LeaseRevoked(Exception):  # noqa: N818 - not an error: the trainer requests another topic
    """Raised when the scheduler holds no lease of this trainer: it was restarted, or revoked it."""


class TopicNotTrainable(Exception):  # noqa: N818 - not an error: other topics are trained
    """Raised when a topic cannot be trained for now, with the reason."""


class Diverged(Exception):  # noqa: N818 - not an error: the candidate is reset
    """Raised when the training loss is not finite."""


@dataclass(frozen=True, slots=True)
class SyntheticStatus:
    """Counts of the SyntheticAnswerGenerator, and its failures."""

    made: int
    yielded: int
    failures: int = 0
    last_error: str | None = None


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """State of a trainer; replaced whole, so that any thread may read it.

    Attributes:
        state: what it does, in words.
        topic: of its round, None without one.
        steps: optimizer steps of the present candidate.
        micro_steps: since the start, as all below.
        training_s: seconds of micro-steps.
        loss: of the last micro-step, None before the first or if it is not finite.
        rounds: that ended with a decision.
        published: of these.
        rejected: likewise.
        failures: rounds that raised.
        last_error: of these, None before the first.
        alive: whether the training thread runs.
        pid: of the process.
        started: unix seconds.
        synthetic: of what makes synthetic records in the same process, None without one.
        vocabulary_coverage: by topic, see ``Candidate.coverage``, at the topic's last round.
    """

    state: str = "starting"
    topic: str | None = None
    steps: int = 0
    micro_steps: int = 0
    training_s: float = 0.0
    loss: float | None = None
    rounds: int = 0
    published: int = 0
    rejected: int = 0
    failures: int = 0
    last_error: str | None = None
    alive: bool = True
    pid: int = 0
    started: float = 0.0
    synthetic: SyntheticStatus | None = None
    vocabulary_coverage: Mapping[str, float] = field(default_factory=dict)


def wait_for_permit(
    acquire: Callable[[], bool],
    until_idle: Callable[[], object],
    poll_s: float,
    *,
    sleep: Callable[[float], object],
    stopped: Callable[[], bool],
) -> None:
    """Ask until ``acquire`` returns True; what it raises is passed on.

    After a denial it waits for ``until_idle``, and before that from ``poll_s`` up to 0.1 s: serving
    may be idle and it not this trainer's turn. Asking takes 2 ms of processor time, of scheduler
    and trainer together, while there is none to spare.

    Raises:
        Stopped: ``stopped`` returns True after a denial, or at the end.
    """
    backoff = Backoff(poll_s, max(poll_s, _LONGEST_POLL_S), _POLL_GROWTH)
    while not acquire():
        if stopped():
            raise Stopped
        sleep(backoff.fail())
        until_idle()
    if stopped():
        raise Stopped
