"""What becomes of a request whose replica fails: a state machine, free of Ray and of clocks.

The front door holds the truth: it knows which tokens came and how much text it has passed on. A
request that loses its replica goes to another one together with both, and that one goes on where
the first stopped. The client's text is the undisturbed one for greedy and seeded requests, whose
tokens depend on the target and the seed alone; an unseeded one goes on by the same law, with
other random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from paceline.actors.decoding.request import (
    FINISH_ABORT,
    FINISH_ERROR,
    GenerationChunk,
    GenerationRequest,
    SpeculativeStats,
)
from paceline.deploy.errors import ApiError, internal, overloaded

_MAX_ATTEMPTS = 100


class Failure(Enum):
    """Why an attempt ended before the answer did."""

    GONE = auto()  # the replica died, cannot be reached or gives no sign of life
    BROKEN = auto()  # it lives, and gave up on this request


@dataclass(frozen=True, slots=True)
class FailoverPolicy:
    """How long a request looks for a replica that answers it.

    Attributes:
        stall_timeout_s: without any chunk for so long, the replica counts as gone.
        give_up_after_s: without any chunk for so long, over all attempts, the request fails.
        max_lost: replicas that may die under one request: one that kills whoever serves it
            must not go round.
        max_broken: replicas that may give up on it.
        first_wait_s: before the first retry that follows another at once; it doubles.
        longest_wait_s: where the doubling ends.
    """

    stall_timeout_s: float = 20.0
    give_up_after_s: float = 120.0
    max_lost: int = 5
    max_broken: int = 1
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0


@dataclass(slots=True)
class Failover:
    """The policy, and how often it was needed since the start.

    ``gone`` and ``broken`` count attempts that failed, ``resumed`` those of them after which a
    request went on from output that its client had, ``given_up`` requests that failed.
    """

    policy: FailoverPolicy
    gone: int = 0
    broken: int = 0
    resumed: int = 0
    given_up: int = 0

    def begin(self, request: GenerationRequest, now: float) -> Resumption:
        """Take on a request; ``now`` are monotonic seconds."""
        return Resumption(request, self, now)

    def counts(self) -> dict[str, int]:
        """What was counted, by name."""
        names = ("gone", "broken", "resumed", "given_up")
        return {name: getattr(self, name) for name in names}


class Resumption:
    """One request over all the replicas that it needs.

    Take what comes with :meth:`take`, what fails with :meth:`fail`; :attr:`request` is what to
    send to the next replica.
    """

    def __init__(self, request: GenerationRequest, failover: Failover, now: float) -> None:
        """Begin; :meth:`Failover.begin` does.

        Args:
            request: as the client asked it, no output yet.
            failover: limits, and counts that are kept.
            now: monotonic seconds.
        """
        self._original = request
        self._failover = failover
        self._policy = failover.policy
        self._alive_at = now
        self._token_ids: list[int] = []
        self._sent_chars = 0
        self._cached: int | None = None
        self._past: list[tuple[int, int]] = []  # speculative rounds of the attempts that failed
        self._present: list[tuple[int, int]] = []
        self._accepted = False  # the present attempt has given a sign of life
        self._attempt = self._lost = self._broken = self._in_vain = 0
        self.finished = False

    @property
    def request(self) -> GenerationRequest:
        """What the next replica is asked: the request with the output that it has so far."""
        return replace(
            self._original,
            output_token_ids=tuple(self._token_ids),
            sent_chars=self._sent_chars,
            attempt=self._attempt,
        )

    @property
    def stall_timeout_s(self) -> float:
        """Seconds without a chunk after which the present replica counts as gone."""
        return self._policy.stall_timeout_s

    def take(self, chunk: GenerationChunk, now: float) -> GenerationChunk | Failure | None:
        """Take what came from the replica.

        Args:
            chunk: as it came.
            now: monotonic seconds.

        Returns:
            what the client gets; None for a mere sign of life; a failure where the replica gave
            up, to be handed to :meth:`fail`.
        """
        self._alive_at, self._accepted, self._in_vain = now, True, 0
        if chunk.finish_reason in (FINISH_ERROR, FINISH_ABORT):
            return Failure.BROKEN
        self._present.extend(chunk.rounds)
        last = chunk.finish_reason is not None
        if not (last or chunk.token_ids or chunk.text):
            return None
        self._token_ids.extend(chunk.token_ids)
        self._sent_chars += len(chunk.text)
        if self._cached is None:
            self._cached = chunk.num_cached_tokens
        self.finished = last
        figures = chunk.speculative
        if figures is not None and self._past:
            figures = added(figures, self._past)
        return replace(chunk, speculative=figures, num_cached_tokens=self._cached)

    def fail(self, failure: Failure, now: float) -> float:
        """The present attempt has ended without a last chunk: try again?

        Args:
            failure: why.
            now: monotonic seconds.

        Returns:
            seconds to wait before :attr:`request` goes to another replica.

        Raises:
            ApiError: it has been tried enough.
        """
        try:
            wait_s = self._try_again(failure, now)
        except ApiError:
            self._failover.given_up += 1
            raise
        self._failover.resumed += bool(self._token_ids)
        return wait_s

    def _try_again(self, failure: Failure, now: float) -> float:
        self._failover.broken += failure is Failure.BROKEN
        self._failover.gone += failure is Failure.GONE
        self._broken += failure is Failure.BROKEN
        self._lost += failure is Failure.GONE and self._accepted
        wait_s = self._wait_s()
        self._attempt += 1
        self._accepted = False
        self._past.extend(self._present)
        self._present.clear()
        if self._broken > self._policy.max_broken:
            raise internal("The target gave up on this request.")
        if self._lost > self._policy.max_lost:
            raise internal("The target keeps failing on this request.")
        late = now + wait_s - self._alive_at > self._policy.give_up_after_s
        if late or self._attempt >= _MAX_ATTEMPTS:
            raise overloaded("The target is not available just now; try again.")
        return wait_s

    def _wait_s(self) -> float:
        """None after a replica that had answered: another may well be there."""
        if self._accepted:
            return 0.0
        self._in_vain += 1
        doubled = self._policy.first_wait_s * 2.0 ** (self._in_vain - 1)
        return min(doubled, self._policy.longest_wait_s)


def added(figures: SpeculativeStats, rounds: Sequence[tuple[int, int]]) -> SpeculativeStats:
    """Figures of the last replica with the rounds of those before, as (drafted, accepted)."""
    longest = max(drafted for drafted, _ in rounds)
    histogram = [*figures.acceptance_histogram]
    histogram.extend([0] * (longest + 1 - len(histogram)))
    for _, accepted in rounds:
        histogram[accepted] += 1
    return replace(
        figures,
        num_spec_steps=figures.num_spec_steps + len(rounds),
        num_draft_tokens=figures.num_draft_tokens + sum(drafted for drafted, _ in rounds),
        num_accepted_draft_tokens=figures.num_accepted_draft_tokens
        + sum(accepted for _, accepted in rounds),
        acceptance_histogram=tuple(histogram),
    )
