"""Engine statistics, against the chunks that clients get."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from itertools import accumulate

from engines import make_engine, request
from hypothesis import given
from hypothesis import strategies as st
from unit.speculation.test_goodput import A, World, make_policy, target_s

from paceline.actors.engine.engine_loop import EngineLoop
from paceline.actors.engine.request import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    GenerationChunk,
    GenerationRequest,
)
from paceline.actors.engine.stats import LONG_S, EngineStats, Histogram, RequestStats, RoundStats

WAIT_S = 20.0


def served(wanted: Iterable[GenerationRequest]) -> tuple[list[GenerationChunk], EngineStats]:
    """Last chunks of the answers, and the figures when all is done; drafts like the target."""
    loop = EngineLoop(make_engine(draft_seed=1, layers=1), num_threads=1)
    try:
        answers: list[queue.Queue[GenerationChunk]] = []
        for one in wanted:
            answers.append(queue.Queue())
            loop.submit(one, answers[-1].put)
        last = []
        for answer in answers:
            while (chunk := answer.get(timeout=WAIT_S)).finish_reason is None:
                pass
            last.append(chunk)
        assert loop.stats().draft_failures == 0
        return last, loop.stats()
    finally:
        loop.close()


def test_round_stats_equal_the_answers() -> None:
    topics = ["sql", "sql", "code", "sql", "code", "sql"]
    asked = [
        request(f"r{i}", [5 + i, 7], topic=topic, ignore_eos=True, max_tokens=13)
        for i, topic in enumerate(topics)
    ]
    chunks, figures = served(asked)
    for topic in ("sql", "code"):
        reported = [c.speculative for c, own in zip(chunks, topics, strict=True) if own == topic]
        assert all(reported)
        counts = figures.rounds.counts[topic, "a"]
        assert counts.drafts == sum(s.num_spec_steps for s in reported if s)
        assert counts.draft_tokens == sum(s.num_draft_tokens for s in reported if s)
        assert counts.accepted_tokens == sum(s.num_accepted_draft_tokens for s in reported if s)
        assert counts.accepted_tokens == sum(counts.accepted_per_position()) > 0
        beyond = [sum(s.acceptance_histogram[i + 1 :]) for s in reported if s for i in range(4)]
        assert [sum(beyond[i::4]) for i in range(4)] == counts.accepted_per_position()
        assert counts.rounds >= counts.drafts
    versions = figures.rounds.versions
    assert list(versions) == [("a", 0)]
    assert versions["a", 0].draft_tokens == sum(
        c.draft_tokens for c in figures.rounds.counts.values()
    )


def test_tokens_and_latencies_of_every_request_are_counted() -> None:
    asked = [request(f"r{i}", [5 + i, 7, 9], ignore_eos=True, max_tokens=13) for i in range(6)]
    _, figures = served(asked)
    requests, rounds = figures.requests, figures.rounds
    assert dict(requests.generation_tokens) == {"sql": 6 * 13}
    assert dict(requests.prompt_tokens) == {"sql": 6 * 3}
    assert len(requests.queue_s.recent) == len(requests.first_token_s.recent) == 6
    assert max(requests.queue_s.recent) <= max(
        requests.first_token_s.recent
    )  # four rows, so two have waited
    assert 1 <= len(requests.per_token_s.recent) <= 6
    assert rounds.tokens >= 6 * 12  # the first ones come with prompts
    assert 0.0 < rounds.drafting_s < rounds.seconds
    assert (figures.running, figures.waiting) == (0, 0)
    assert figures.kv_blocks_available == figures.kv_blocks
    assert figures.predicted_goodput is None  # no controller
    assert rounds.plain_s == 0.0


def test_tokens_cut_by_a_stop_string_count_as_generated() -> None:
    whole, _ = served([request("r", [5, 7], ignore_eos=True, max_tokens=12)])
    text = "".join(c.text for c in whole)
    stop = text[-1:] or "x"
    chunks, figures = served([request("r", [5, 7], ignore_eos=True, max_tokens=12, stop=(stop,))])
    assert figures.requests.generation_tokens["sql"] >= chunks[0].num_cut_tokens


def test_requests_without_drafts_have_no_draft_stats() -> None:
    off = request("r", [5], draft="off", ignore_eos=True)
    zero = request("s", [6], num_speculative_tokens=0, ignore_eos=True)
    _, figures = served([off, zero])
    assert figures.rounds.counts == {}
    assert figures.requests.generation_tokens["sql"] == 40


def test_only_the_latest_versions_of_a_slot_are_kept() -> None:
    stats = RoundStats()
    for version in range(9):
        stats.add_row("sql", "sql@candidate" if version % 2 else "sql", version, 4, 2)
        stats.add_row("sql", "sql@0", 0, 4, 1)
    stats.add_row("code", "code", 3, 4, 4)
    assert [version for draft, version in stats.versions if draft == "sql"] == [4, 6, 8]
    assert [v for draft, v in stats.versions if draft == "sql@candidate"] == [3, 5, 7]
    assert stats.versions["sql@0", 0].drafts == 9
    assert stats.versions["code", 3].accepted_tokens == 4
    assert sum(c.drafts for (_, d), c in stats.counts.items() if d == "sql@0") == 9


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_latencies_of_a_request() -> None:
    clock = Clock()
    stats = RequestStats(clock)
    stats.on_arrival(request("r", [5, 6]), 10.0)
    stats.on_admitted(["r", "unknown"], 12.0)
    clock.now = 13.0
    stats.on_output("r", 0, None)  # its prompt is read
    stats.on_output("r", 3, None)
    stats.on_admitted(["r"], 14.0)  # again: it gave up its memory
    clock.now = 15.0
    stats.on_output("r", 4, FINISH_LENGTH)
    assert list(stats.queue_s.recent) == [2.0]
    assert list(stats.first_token_s.recent) == [3.0]
    assert list(stats.per_token_s.recent) == [0.5]
    assert list(stats.inter_token_s.recent) == [2.0]
    assert list(stats.e2e_s.recent) == [5.0]
    assert (list(stats.prompt_lengths.recent), list(stats.output_lengths.recent)) == ([2], [7])
    assert stats.finished == {FINISH_LENGTH: 1}
    stats.on_output("r", 1, FINISH_LENGTH)
    assert stats.generation_tokens["sql"] == 7


def test_failed_resumed_and_aborted_requests_have_no_latencies() -> None:
    clock = Clock()
    stats = RequestStats(clock)
    stats.on_arrival(request("failed", [5]), 0.0)
    stats.on_arrival(request("resumed", [5], output_token_ids=(6, 7), attempt=1), 0.0)
    stats.on_arrival(request("dropped", [5]), 0.0)
    stats.on_admitted(["failed#0", "resumed#1"], 1.0)
    stats.on_abort("dropped")
    stats.on_abort("dropped")
    stats.on_output("failed", 1, None)
    clock.now = 5.0
    stats.on_output("failed", 2, FINISH_ERROR)
    stats.on_output("resumed#1", 2, FINISH_LENGTH)
    assert list(stats.per_token_s.recent) == []
    assert list(stats.first_token_s.recent) == [0.0]
    assert stats.prompt_tokens["sql"] == 2
    assert stats.generation_tokens["sql"] == 5
    assert list(stats.e2e_s.recent) == list(stats.output_lengths.recent) == []
    assert stats.finished == {FINISH_ABORT: 1, FINISH_ERROR: 1, FINISH_LENGTH: 1}


@given(st.lists(st.floats(0.0, 200.0)))
def test_a_histogram_counts_every_value_once_in_the_first_bucket_that_holds_it(
    values: list[float],
) -> None:
    histogram = Histogram(LONG_S)
    for value in values:
        histogram.observe(value)
    below = list(accumulate(histogram.counts))
    assert below == [sum(v <= bound for v in values) for bound in (*LONG_S, float("inf"))]
    assert histogram.sum == sum(values)


def test_the_policy_says_what_it_chose_and_expects() -> None:
    fresh = make_policy()
    assert fresh.predicted_goodput is None
    assert fresh.plain_decode_seconds(4, 12) == 3 * target_s(4, 1)
    good, bad = World({A: 4}, {A: 0.9}), World({A: 4}, {A: 0.0})
    good.run(400)
    bad.run(400)
    assert good.policy.current_k("a") >= 3
    assert bad.policy.current_k("a") == 0
    assert good.policy.predicted_goodput is not None
    assert bad.policy.predicted_goodput is not None
    plain = 4 / target_s(4, 1)
    assert bad.policy.predicted_goodput < 1.1 * plain < good.policy.predicted_goodput
