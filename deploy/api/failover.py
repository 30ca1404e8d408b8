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
from zlib import crc32

from paceline.actors.engine.request import (
    FAILED,
    FINISH_ABORT,
    FINISH_FAULT,
    FINISH_NOT_FINITE,
    FINISH_REFUSED,
    GenerationChunk,
    GenerationRequest,
    SpeculativeStats,
)
from paceline.deploy.errors import ApiError, internal, overloaded

_MAX_ATTEMPTS = 100


class Failure(Enum):
    """Why an attempt ended before the answer did."""

    GONE = auto()  # the replica died, cannot be reached or gives no sign of life
    BROKEN = auto()  # it lives, and gave up on this request alone
    NOT_FINITE = auto()  # the request's logits are NaN or infinite, as they would be elsewhere
    FAULT = auto()  # its engine failed while it ran this request, perhaps for another's sake


_FAILURES = {FINISH_FAULT: Failure.FAULT, FINISH_NOT_FINITE: Failure.NOT_FINITE}


@dataclass(frozen=True, slots=True)
class FailoverPolicy:
    """How long a request looks for a replica that answers it.

    Attributes:
        stall_timeout_s: without any chunk for so long, the replica counts as gone.
        give_up_after_s: without any chunk for so long, over all attempts, the request fails.
        max_lost: replicas that may die under one request: one that kills whoever serves it
            must not go round.
        max_broken: replicas that may give up on it.
        max_faults: engines that may fail under it in a row without one more token: those that
            merely ran beside the cause get on in between, the cause never does.
        first_wait_s: before a retry, but for the first one after a loss; it doubles.
        longest_wait_s: where the doubling ends.
    """

    stall_timeout_s: float = 20.0
    give_up_after_s: float = 120.0
    max_lost: int = 5
    max_broken: int = 1
    max_faults: int = 3
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0


@dataclass(slots=True)
class Failover:
    """The policy, and how often it was needed since the start.

    ``gone``, ``broken`` and ``faults`` count attempts that failed, ``resumed`` those of them
    after which a request went on from output that its client had, ``given_up`` requests that
    failed.
    """

    policy: FailoverPolicy
    gone: int = 0
    broken: int = 0
    faults: int = 0
    resumed: int = 0
    given_up: int = 0

    def begin(self, request: GenerationRequest, now: float) -> Resumption:
        """Take on a request; ``now`` are monotonic seconds."""
        return Resumption(request, self, now)

    def counts(self) -> dict[str, int]:
        """What was counted, by name."""
        names = ("gone", "broken", "faults", "resumed", "given_up")
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
        self._faults = self._tokens_at_fault = 0
        self._failed_on: list[str] = []
        self.finished = False

    @property
    def request(self) -> GenerationRequest:
        """What the next replica is asked: the request with the output that it has so far."""
        return replace(
            self._original,
            output_token_ids=tuple(self._token_ids),
            sent_chars=self._sent_chars,
            attempt=self._attempt,
            failed_on=tuple(self._failed_on),
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
        if chunk.finish_reason in FAILED:
            return self._blame(chunk)
        self._alive_at, self._accepted, self._in_vain = now, True, 0
        if chunk.finish_reason == FINISH_ABORT:
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

    def _blame(self, chunk: GenerationChunk) -> Failure:
        """What the replica says that failed; it is no sign of life."""
        if chunk.replica_id:
            others = [name for name in self._failed_on if name != chunk.replica_id]
            self._failed_on = [*others, chunk.replica_id]
        if chunk.finish_reason == FINISH_REFUSED:
            self._accepted = False  # it had no part in what happened there
            return Failure.GONE
        return _FAILURES.get(chunk.finish_reason or "", Failure.BROKEN)

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
        if failure is Failure.NOT_FINITE:
            raise internal(
                "The target's logits for this request are not finite (NaN or infinite), so it has "
                "no answer. Activations that overflow target.dtype are the usual cause."
            )
        self._failover.broken += failure is Failure.BROKEN
        self._failover.gone += failure is Failure.GONE
        self._failover.faults += failure is Failure.FAULT
        self._broken += failure is Failure.BROKEN
        self._lost += failure is Failure.GONE and self._accepted
        if failure is Failure.FAULT:
            got_on = len(self._token_ids) > self._tokens_at_fault
            self._faults = 1 if got_on else self._faults + 1
            self._tokens_at_fault = len(self._token_ids)
        wait_s = self._wait_s(failure)
        self._attempt += 1
        self._accepted = False
        self._past.extend(self._present)
        self._present.clear()
        if self._broken > self._policy.max_broken:
            raise internal("The target gave up on this request.")
        if self._lost > self._policy.max_lost or self._faults > self._policy.max_faults:
            raise internal("The target keeps failing on this request.")
        late = now + wait_s - self._alive_at > self._policy.give_up_after_s
        if late or self._attempt >= _MAX_ATTEMPTS:
            raise overloaded("The target is not available just now; try again.")
        return wait_s

    def _wait_s(self, failure: Failure) -> float:
        """None after the death of a replica that had answered: another may well be there.

        After a fault up to twice as long, each request its own time: those that ran beside the
        one that caused it part from it.
        """
        times, spread = self._broken + self._faults, 1.0
        if failure is Failure.GONE:
            if self._accepted:
                return 0.0
            self._in_vain += 1
            times = self._in_vain
        elif failure is Failure.FAULT:
            spread += crc32(self.request.run_id.encode()) / 2**32
        doubled = self._policy.first_wait_s * 2.0 ** (times - 1)
        return min(doubled * spread, self._policy.longest_wait_s)


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
