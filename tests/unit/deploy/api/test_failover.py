"""A request over several replicas: one text, tokens once each, and an end to the trying."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.request import (
    FINISH_GRAMMAR,
    GenerationChunk,
    GenerationRequest,
    SamplingParams,
    SpeculativeStats,
    merge_chunks,
)
from paceline.deploy.api.failover import Failover, FailoverPolicy, Failure, add_rounds
from paceline.deploy.errors import ApiError

POLICY = FailoverPolicy(stall_timeout_s=20.0, failover_timeout_s=120.0)
REQUEST = GenerationRequest("r", (1, 2, 3), SamplingParams(max_tokens=100))
BEAT = GenerationChunk("", ())
ANSWER = [(token, text) for token, text in enumerate(["Sel", "", "ect", " é", "", "漢", " x", "."])]


@dataclass
class Replica:
    """What a target does with a request: goes on from its output, gives text that is not sent."""

    request: GenerationRequest

    def __post_init__(self) -> None:
        self.at = len(self.request.output_token_ids)
        assert self.request.output_token_ids == tuple(token for token, _ in ANSWER[: self.at])
        assert self.request.sent_chars == len("".join(text for _, text in ANSWER[: self.at]))
        self.steps = 0

    def chunk(self, size: int) -> GenerationChunk:
        part = ANSWER[self.at : self.at + size]
        self.at += len(part)
        self.steps += 1
        last = self.at == len(ANSWER)
        return GenerationChunk(
            text="".join(text for _, text in part),
            token_ids=tuple(token for token, _ in part),
            finish_reason="stop" if last else None,
            speculative=self.stats() if last else None,
            rounds=((4, 1),),
            suffix_rounds=((3, 2), (1, 0)),
            num_cached_tokens=len(self.request.output_token_ids) + 2,
        )

    def stats(self) -> SpeculativeStats:
        steps = self.steps
        return SpeculativeStats(
            "sql", 4, steps, 4 * steps, steps, (0, steps), 0, 4 * steps, 2 * steps
        )


FINAL = (Failure.NOT_FINITE, Failure.GRAMMAR)
RECOVERABLE = [failure for failure in Failure if failure not in FINAL]
# Rounds of an attempt: sizes of its chunks, 0 for a sign of life; then it fails.
ATTEMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=4), st.sampled_from(RECOVERABLE)), max_size=5
)


@given(ATTEMPTS, st.integers(1, 8))
def test_the_client_sees_the_undisturbed_text_whatever_fails(
    attempts: list[tuple[list[int], Failure]], last_size: int
) -> None:
    state = Failover(FailoverPolicy(max_broken=9, max_gone=9, max_faults=9)).start(REQUEST, now=0.0)
    seen: list[GenerationChunk] = []
    rounds, names = 0, set()
    for sizes, failure in [*attempts, ([last_size] * 8, None)]:
        names.add(state.request.run_id)
        replica = Replica(state.request)
        for size in sizes:
            if state.finished:
                break
            piece = state.on_chunk(replica.chunk(size) if size else BEAT, now=1.0)
            rounds += size > 0
            assert not isinstance(piece, Failure)
            assert (piece is None) == (size == 0)
            if piece is not None:
                seen.append(piece)
        if state.finished:
            break
        assert failure is not None
        assert state.on_failure(failure, now=1.0) <= POLICY.max_backoff_s
    assert state.finished
    whole = merge_chunks(seen)
    assert whole.token_ids == tuple(token for token, _ in ANSWER)
    assert whole.text == "".join(text for _, text in ANSWER)
    assert whole.finish_reason == "stop"
    assert [piece.finish_reason for piece in seen[:-1]] == [None] * (len(seen) - 1)
    assert [piece.speculative for piece in seen[:-1]] == [None] * (len(seen) - 1)
    assert whole.speculative is not None
    # every chunk of the fake replica is one speculative round
    assert whole.speculative.num_spec_steps == rounds
    assert whole.speculative.num_draft_tokens == 4 * rounds
    assert whole.speculative.num_accepted_draft_tokens == rounds
    assert whole.speculative.acceptance_histogram[:2] == (0, rounds)
    own = whole.speculative.num_suffix_tokens, whole.speculative.num_accepted_suffix_tokens
    assert own == (4 * rounds, 2 * rounds)
    assert {piece.num_cached_tokens for piece in seen} == {2}


@given(st.lists(st.booleans(), max_size=300), st.floats(0.001, 3.0))
def test_the_trying_comes_to_an_end(lives: list[bool], took_s: float) -> None:
    """However it fails: replicas that show life and die, and replicas that never answer."""
    state = Failover(POLICY).start(REQUEST, now=0.0)
    now, attempts, died = 0.0, 0, 0

    def go_on() -> None:
        nonlocal now, attempts, died
        for life in [*lives, *[False] * 300]:
            attempts += 1
            if life:
                died += 1
                state.on_chunk(BEAT, now)
            now += took_s
            now += state.on_failure(Failure.GONE, now)

    with pytest.raises(ApiError) as caught:
        go_on()
    assert caught.value.status in (500, 503)
    assert (caught.value.retry_after_s is not None) == (caught.value.status == 503)
    assert died <= POLICY.max_gone + 1
    assert attempts <= 100
    assert now <= (died + 1) * (POLICY.failover_timeout_s + took_s)


def test_a_request_without_finite_logits_is_not_sent_again() -> None:
    failover = Failover(POLICY)
    state = failover.start(REQUEST, now=0.0)
    ended = GenerationChunk("", (), finish_reason="not_finite")
    assert state.on_chunk(ended, 1.0) is Failure.NOT_FINITE
    with pytest.raises(ApiError, match="not finite") as caught:
        state.on_failure(Failure.NOT_FINITE, 1.0)
    assert (caught.value.status, caught.value.code) == (500, "internal_error")
    assert failover.counts() == dict.fromkeys(failover.counts(), 0) | {"given_up": 1}


def test_a_grammar_that_cannot_go_on_is_the_requests_fault() -> None:
    request = replace(REQUEST, grammar="g", grammar_param="response_format")
    state = Failover(POLICY).start(request, now=0.0)
    ended = GenerationChunk("", (), finish_reason=FINISH_GRAMMAR)
    assert state.on_chunk(ended, 1.0) is Failure.GRAMMAR
    with pytest.raises(ApiError, match="grammar") as caught:
        state.on_failure(Failure.GRAMMAR, 1.0)
    assert (caught.value.status, caught.value.param) == (400, "response_format")


def test_a_replica_that_gives_up_is_replaced_once() -> None:
    state = Failover(POLICY).start(REQUEST, now=0.0)
    error = GenerationChunk("half", (9,), finish_reason="error")
    for _ in range(POLICY.max_broken):
        assert state.on_chunk(error, 1.0) is Failure.BROKEN
        assert state.on_failure(Failure.BROKEN, 1.0) == POLICY.initial_backoff_s
    assert state.request.output_token_ids == ()  # what came with the error is not the client's
    assert state.on_chunk(error, 2.0) is Failure.BROKEN
    with pytest.raises(ApiError) as caught:
        state.on_failure(Failure.BROKEN, 2.0)
    assert caught.value.status == 500


FAULT = GenerationChunk("", (), finish_reason="fault", replica_id="a")
REFUSED = GenerationChunk("", (), finish_reason="refused", replica_id="b")
TOKEN = GenerationChunk("x", (7,))


def test_an_engine_that_fails_under_a_request_that_gets_on_is_not_charged_to_it() -> None:
    failover = Failover(POLICY)
    state = failover.start(REQUEST, now=0.0)
    for _ in range(4 * POLICY.max_faults):
        assert state.on_chunk(TOKEN, 1.0) is not None
        assert state.on_chunk(FAULT, 1.0) is Failure.FAULT
        wait = state.on_failure(Failure.FAULT, 1.0)
        assert POLICY.initial_backoff_s <= wait < 2 * POLICY.initial_backoff_s
    assert failover.counts() | {"faults": 0, "resumed": 0} == dict.fromkeys(failover.counts(), 0)


def test_a_request_under_which_every_engine_fails_comes_to_its_end() -> None:
    state = Failover(POLICY).start(REQUEST, now=0.0)
    waits = []
    for _ in range(POLICY.max_faults):
        assert state.on_chunk(FAULT, 1.0) is Failure.FAULT
        waits.append(state.on_failure(Failure.FAULT, 1.0))
    assert all(2**i <= 10 * wait < 2 ** (i + 1) for i, wait in enumerate(waits))
    with pytest.raises(ApiError) as caught:
        state.on_failure(Failure.FAULT, 1.0)
    assert caught.value.status == 500


def test_those_that_a_fault_hits_together_come_back_at_times_of_their_own() -> None:
    waits = set()
    for i in range(20):
        state = Failover(POLICY).start(GenerationRequest(f"r{i}", (1,), REQUEST.sampling), 0.0)
        waits.add(state.on_failure(Failure.FAULT, 1.0))
    assert len(waits) == 20


def test_a_replica_that_refuses_counts_as_gone_and_never_as_lost() -> None:
    failover = Failover(POLICY)
    state = failover.start(REQUEST, now=0.0)
    state.on_chunk(BEAT, 0.0)  # it waited there
    waits = []
    for _ in range(2 * POLICY.max_gone):
        assert state.on_chunk(REFUSED, 1.0) is Failure.GONE
        waits.append(state.on_failure(Failure.GONE, 1.0))
    assert waits[:3] == [0.1, 0.2, 0.4]
    assert (failover.gone, failover.broken) == (2 * POLICY.max_gone, 0)
    assert state.on_chunk(REFUSED, 200.0) is Failure.GONE  # a refusal is no sign of life
    with pytest.raises(ApiError) as caught:
        state.on_failure(Failure.GONE, 200.0)
    assert caught.value.status == 503


def test_retries_name_the_failed_replicas_the_latest_last() -> None:
    state = Failover(POLICY).start(REQUEST, now=0.0)
    for chunk in (FAULT, REFUSED, FAULT):
        failure = state.on_chunk(chunk, 1.0)
        assert isinstance(failure, Failure)
        state.on_failure(failure, 1.0)
    assert state.request.failed_on == ("b", "a")


def test_the_next_replica_is_asked_at_once_after_one_that_answered_and_later_after_none() -> None:
    state = Failover(POLICY).start(REQUEST, now=0.0)
    state.on_chunk(BEAT, 1.0)
    waits = [state.on_failure(Failure.GONE, 1.0) for _ in range(8)]
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    state.on_chunk(BEAT, 2.0)
    assert state.on_failure(Failure.GONE, 2.0) == 0.0
    assert state.request.attempt == 9
    assert state.request.run_id == "r#9"


def test_signs_of_life_let_a_request_wait_in_a_queue_for_ever() -> None:
    state = Failover(POLICY).start(REQUEST, now=0.0)
    for now in range(10, 10_000, 10):
        assert state.on_chunk(BEAT, float(now)) is None
    assert state.on_failure(Failure.GONE, 10_000.0) == 0.0


def test_added_sums_and_keeps_the_last_ones_names() -> None:
    both = add_rounds(SpeculativeStats("sql", 5, 1, 2, 1, (0, 1)), [(4, 3), (2, 0)], [(3, 1)])
    assert both == SpeculativeStats("sql", 5, 3, 8, 4, (1, 1, 0, 1, 0), 0, 3, 1)
