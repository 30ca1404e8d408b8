"""Failover of requests to other replicas of the target: a state machine without Ray or clocks.

The ingress knows which tokens have come and how much text it has sent. When a replica fails, the
next one gets the request with both and resumes it there. The text of greedy and seeded requests,
whose tokens depend on the target and the seed alone, is the same as without the failure; an
unseeded request resumes with the same distribution and other random numbers.
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
    FINISH_GRAMMAR,
    FINISH_NOT_FINITE,
    FINISH_REFUSED,
    GenerationChunk,
    GenerationRequest,
    SpeculativeStats,
)
from paceline.deploy.errors import ApiError, internal, overloaded

_MAX_ATTEMPTS = 100
_Rounds = list[tuple[int, int]]  # (drafted, accepted) of each


class Failure(Enum):
    """Why an attempt ended before its request was finished."""

    GONE = auto()  # the replica is dead, unreachable or stalled
    BROKEN = auto()  # the replica is alive and aborted this request
    NOT_FINITE = auto()  # NaN or infinite logits, as they would be on every replica
    GRAMMAR = auto()  # the request's grammar cannot go on, as it could not on any replica
    FAULT = auto()  # the engine failed, perhaps because of another request


_FAILURES = {
    FINISH_FAULT: Failure.FAULT,
    FINISH_NOT_FINITE: Failure.NOT_FINITE,
    FINISH_GRAMMAR: Failure.GRAMMAR,
}


@dataclass(frozen=True, slots=True)
class FailoverPolicy:
    """Limits of a request's failover.

    Attributes:
        stall_timeout_s: a replica without a chunk for so long counts as gone.
        failover_timeout_s: a request without a chunk for so long, over all attempts, fails.
        max_gone: replicas that may die while they run the request: a request that kills its
            replicas must not kill them all.
        max_broken: replicas that may abort it.
        max_faults: engine faults in a row without a new token: requests that only ran beside
            the cause make progress in between, the cause does not.
        initial_backoff_s: before a retry, except the first one after a loss; it doubles.
        max_backoff_s: most that doubling makes of it.
    """

    stall_timeout_s: float = 20.0
    failover_timeout_s: float = 120.0
    max_gone: int = 5
    max_broken: int = 1
    max_faults: int = 3
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0


@dataclass(slots=True)
class Failover:
    """The policy, and counters since the start.

    Attributes:
        policy: of new requests.
        gone: attempts that failed, by `Failure`; ``broken`` and ``faults`` likewise.
        resumed: failed attempts after which a request resumed from output already sent.
        given_up: requests that failed.
    """

    policy: FailoverPolicy
    gone: int = 0
    broken: int = 0
    faults: int = 0
    resumed: int = 0
    given_up: int = 0

    def start(self, request: GenerationRequest, now: float) -> ResumableRequest:
        """Start a request; ``now`` in monotonic seconds."""
        return ResumableRequest(request, self, now)

    def counts(self) -> dict[str, int]:
        """The counters by name."""
        names = ("gone", "broken", "faults", "resumed", "given_up")
        return {name: getattr(self, name) for name in names}


class ResumableRequest:
    """A request over all the replicas that it needs; :meth:`Failover.start` makes one.

    Pass chunks to :meth:`on_chunk` and failures to :meth:`on_failure`; send :attr:`request` to
    the next replica.

    Attributes:
        finished: whether the last chunk has come.
    """

    def __init__(self, request: GenerationRequest, failover: Failover, now: float) -> None:
        self._original = request
        self._failover = failover
        self._policy = failover.policy
        self._chunk_at = now
        self._token_ids: list[int] = []
        self._sent_chars = 0
        self._cached: int | None = None
        self._has_prompt_logprobs = False
        # Of drafts and of suffixes, in failed attempts and in the present one.
        self._past_rounds: tuple[_Rounds, _Rounds] = [], []
        self._rounds: tuple[_Rounds, _Rounds] = [], []
        self._responded = False  # whether the present attempt has given a chunk
        self._attempt = self._gone = self._broken = self._unanswered = 0
        self._faults = self._tokens_at_fault = 0
        self._failed_on: list[str] = []
        self.finished = False

    @property
    def request(self) -> GenerationRequest:
        """The request for the next replica, with the output so far."""
        sampling = self._original.sampling
        if self._has_prompt_logprobs:
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            self._original,
            sampling=sampling,
            output_token_ids=tuple(self._token_ids),
            sent_chars=self._sent_chars,
            attempt=self._attempt,
            failed_on=tuple(self._failed_on),
        )

    @property
    def stall_timeout_s(self) -> float:
        """See FailoverPolicy."""
        return self._policy.stall_timeout_s

    def on_chunk(self, chunk: GenerationChunk, now: float) -> GenerationChunk | Failure | None:
        """Handle a chunk of the replica.

        Args:
            chunk: as received.
            now: monotonic seconds.

        Returns:
            the chunk for the client; None for a heartbeat; a failure if the replica gave up, to
            be passed to :meth:`on_failure`.
        """
        if chunk.finish_reason in FAILED:
            return self._failure_of(chunk)
        self._chunk_at, self._responded, self._unanswered = now, True, 0
        if chunk.finish_reason == FINISH_ABORT:
            return Failure.BROKEN
        for own, new in zip(self._rounds, (chunk.rounds, chunk.suffix_rounds), strict=True):
            own.extend(new)
        last = chunk.finish_reason is not None
        if not (last or chunk.token_ids or chunk.text):
            return None
        self._token_ids.extend(chunk.token_ids)
        self._sent_chars += len(chunk.text)
        self._has_prompt_logprobs |= chunk.prompt_logprobs is not None
        if self._cached is None:
            self._cached = chunk.num_cached_tokens
        self.finished = last
        stats = chunk.speculative
        if stats is not None:
            stats = add_rounds(stats, *self._past_rounds)
        return replace(chunk, speculative=stats, num_cached_tokens=self._cached)

    def _failure_of(self, chunk: GenerationChunk) -> Failure:
        """The failure that a chunk reports; it does not reset the timeouts."""
        if chunk.replica_id:
            others = [name for name in self._failed_on if name != chunk.replica_id]
            self._failed_on = [*others, chunk.replica_id]
        if chunk.finish_reason == FINISH_REFUSED:
            self._responded = False  # the replica failed before it ran this request
            return Failure.GONE
        return _FAILURES.get(chunk.finish_reason or "", Failure.BROKEN)

    def on_failure(self, failure: Failure, now: float) -> float:
        """Handle the failure of the present attempt.

        Args:
            failure: of the attempt.
            now: monotonic seconds.

        Returns:
            seconds to wait before :attr:`request` goes to another replica.

        Raises:
            ApiError: a limit of the policy is reached.
        """
        try:
            backoff_s = self._retry(failure, now)
        except ApiError:
            self._failover.given_up += 1
            raise
        self._failover.resumed += bool(self._token_ids)
        return backoff_s

    def _retry(self, failure: Failure, now: float) -> float:
        if failure is Failure.NOT_FINITE:
            raise internal(
                "The target's logits for this request are not finite (NaN or infinite), so it has "
                "no answer. Activations that overflow target.dtype are the usual cause."
            )
        if failure is Failure.GRAMMAR:
            raise ApiError(
                400,
                "The answer cannot go on by the request's grammar, which is at a dead end or too "
                "complex from here.",
                param=self._original.grammar_param,
                code="invalid_value",
            )
        self._failover.broken += failure is Failure.BROKEN
        self._failover.gone += failure is Failure.GONE
        self._failover.faults += failure is Failure.FAULT
        self._broken += failure is Failure.BROKEN
        self._gone += failure is Failure.GONE and self._responded
        if failure is Failure.FAULT:
            progressed = len(self._token_ids) > self._tokens_at_fault
            self._faults = 1 if progressed else self._faults + 1
            self._tokens_at_fault = len(self._token_ids)
        backoff_s = self._backoff_s(failure)
        self._attempt += 1
        self._responded = False
        for past, own in zip(self._past_rounds, self._rounds, strict=True):
            past.extend(own)
            own.clear()
        if self._broken > self._policy.max_broken:
            raise internal("The target gave up on this request.")
        if self._gone > self._policy.max_gone or self._faults > self._policy.max_faults:
            raise internal("The target keeps failing on this request.")
        late = now + backoff_s - self._chunk_at > self._policy.failover_timeout_s
        if late or self._attempt >= _MAX_ATTEMPTS:
            raise overloaded("The target is not available just now; try again.")
        return backoff_s

    def _backoff_s(self, failure: Failure) -> float:
        """Seconds before the next attempt; 0 after the loss of a replica that had responded.

        After an engine fault up to twice as long, by request: this separates the request that
        causes the faults from the others.
        """
        times, spread = self._broken + self._faults, 1.0
        if failure is Failure.GONE:
            if self._responded:
                return 0.0
            self._unanswered += 1
            times = self._unanswered
        elif failure is Failure.FAULT:
            spread += crc32(self.request.run_id.encode()) / 2**32
        doubled = self._policy.initial_backoff_s * 2.0 ** (times - 1)
        return min(doubled * spread, self._policy.max_backoff_s)


def add_rounds(
    stats: SpeculativeStats,
    rounds: Sequence[tuple[int, int]],
    suffix_rounds: Sequence[tuple[int, int]],
) -> SpeculativeStats:
    """The last attempt's statistics plus the rounds (drafted, accepted) of earlier ones."""
    longest = max((drafted for drafted, _ in rounds), default=-1)
    histogram = [*stats.acceptance_histogram]
    histogram.extend([0] * (longest + 1 - len(histogram)))
    for _, accepted in rounds:
        histogram[accepted] += 1
    return replace(
        stats,
        num_spec_steps=stats.num_spec_steps + len(rounds),
        num_draft_tokens=stats.num_draft_tokens + sum(drafted for drafted, _ in rounds),
        num_accepted_draft_tokens=stats.num_accepted_draft_tokens
        + sum(accepted for _, accepted in rounds),
        acceptance_histogram=tuple(histogram),
        num_suffix_tokens=stats.num_suffix_tokens + sum(drafted for drafted, _ in suffix_rounds),
        num_accepted_suffix_tokens=stats.num_accepted_suffix_tokens
        + sum(accepted for _, accepted in suffix_rounds),
    )
