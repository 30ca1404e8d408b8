"""Statistics of a sequence's rounds, and its stop tokens."""

from __future__ import annotations

from typing import Any

import pytest
from engines import TOKENIZER, make_engine, request, run, tokens_of, twin_engine
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.detokenizer import IncrementalDetokenizer
from paceline.actors.engine.request import (
    GenerationRequest,
    SamplingParams,
    with_all_stop_token_ids,
    with_stop_token_ids,
)
from paceline.actors.engine.sequence import Sequence

EOS = frozenset({2})
ROUND = st.tuples(st.lists(st.integers(2, 60), max_size=8), st.integers(0, 8), st.integers(2, 60))


@given(
    st.lists(ROUND, min_size=1, max_size=12),
    st.sets(st.integers(3, 60), max_size=4),
    st.lists(st.sampled_from(["a", "b", "e", " "]), max_size=2),
    st.integers(1, 60),
)
def test_accepted_and_final_tokens_are_the_answer(
    rounds: list[tuple[list[int], int, int]], ids: set[int], stops: list[str], limit: int
) -> None:
    """However an answer ends: a token of a draft is accepted where it is in the answer."""
    asked = request(
        "r", [5, 6], max_tokens=limit, stop_token_ids=tuple(sorted(ids)), stop=tuple(stops)
    )
    text = IncrementalDetokenizer(TOKENIZER, asked.sampling.stop, prompt=(5, 6))
    sequence = Sequence(asked, text, limit, None, weight_version=0, recorder=None)
    from_drafts = finals = steps = reported = played = cut = 0
    for draft, wanted, final in rounds:
        accepted = min(wanted, len(draft))
        before = sequence.num_output
        sequence.append_round(len(draft), accepted, [*draft[:accepted], final], EOS)
        taken = sequence.num_output - before
        from_drafts += min(taken, accepted)
        finals += taken > accepted
        cut += taken <= accepted
        played += 1
        steps += bool(draft)
        reported += sum(accepted for _, accepted in sequence.next_chunk().rounds)
        counted = sequence.last_round
        assert counted == ((taken, taken) if taken <= accepted else (len(draft), accepted))
        if sequence.finish_reason:
            break
    stats = sequence.stats()
    assert stats.num_accepted_draft_tokens == from_drafts
    assert from_drafts + finals == sequence.num_output
    assert stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    histogram = stats.acceptance_histogram
    assert sum(histogram) == stats.num_spec_steps == steps
    assert sum(i * count for i, count in enumerate(histogram)) == from_drafts
    held = sum(accepted for _, accepted in sequence._unsent_rounds)  # with text that may be a stop
    assert reported + held == from_drafts
    assert held == 0 or sequence.finish_reason is None
    assert stats.num_cut_rounds == cut <= (sequence.finish_reason is not None)
    if steps == played:
        assert steps * stats.mean_acceptance_length == pytest.approx(sequence.num_output)


def test_tokens_behind_the_end_are_not_counted() -> None:
    """A draft that is the target, stopped within its first round, by its second token there."""
    prompt = TOKENIZER.encode("SELECT name", add_special_tokens=False)

    def asked(**more: Any) -> GenerationRequest:
        return request("r", prompt, ignore_eos=True, **more)

    first, second, third = tokens_of(run(twin_engine(k=8), [asked()])["r"])[:3]
    assert third not in (first, second)
    engine = twin_engine(k=8)
    outputs = run(engine, [asked(stop_token_ids=(third,))])["r"]
    assert tokens_of(outputs) == [first, second, third]  # the first comes with the prompt
    stats = outputs[-1].chunk.speculative
    assert stats is not None
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (2, 2)
    assert stats.mean_acceptance_length == 2.0
    assert outputs[-1].chunk.rounds == ((2, 2),)
    counts = engine.draft_runner.round_stats.counts["sql", "a"]
    assert (counts.drafts, counts.draft_tokens, counts.accepted_tokens) == (1, 2, 2)
    outcome = outputs[-1].outcome
    assert outcome is not None
    assert (outcome.rounds, outcome.accepted) == (1, 1)


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({}, ("stop", "a", 1)),
        ({"include_stop": True}, ("stop", "a\ufffd", 0)),
        ({"max_tokens": 3}, (None, "a", 0)),
        ({"min_tokens": 2}, ("stop", "a", 1)),
        ({"min_tokens": 3}, ("length", "a\ufffd", 0)),
    ],
)
def test_a_stop_string_that_an_incomplete_character_completes_ends_the_answer(
    more: dict[str, Any], ends: tuple[str | None, str, int]
) -> None:
    asked = request("r", [5, 6], stop=("\ufffd",), **{"max_tokens": 2} | more)
    sampling = asked.sampling
    text = IncrementalDetokenizer(
        TOKENIZER, sampling.stop, prompt=(5, 6), include_stop=sampling.include_stop
    )
    sequence = Sequence(asked, text, sampling.max_tokens, None, weight_version=0, recorder=None)
    sequence.append_round(0, 0, [*TOKENIZER.encode("a"), TOKENIZER.encode("☕")[0]], EOS)
    chunk = sequence.next_chunk()
    assert (chunk.finish_reason, chunk.text, chunk.num_cut_tokens) == ends


def test_a_special_tokens_text_stops_as_the_token_does() -> None:
    """Here `</s>`, which the engine's settings and ``ignore_eos`` let pass."""
    prompt = TOKENIZER.encode("SELECT name", add_special_tokens=False)
    asked = request(
        "r", prompt, ignore_eos=True, min_tokens=3, logit_bias=((2, 100.0),), stop=("</s>",)
    )
    outputs = run(make_engine(), [asked])["r"]
    answer = tokens_of(outputs)
    assert len(answer) == 4  # three that may not be it, and the token itself
    assert answer[3] == 2 not in answer[:3]
    assert outputs[-1].chunk.finish_reason == "stop"


def test_a_special_token_that_the_target_lacks_is_no_stop_token() -> None:
    asked = request("r", [5, 6], stop=("</s>", "<s>"), stop_token_ids=(9,))
    found = with_stop_token_ids(asked, {1: "<s>", 2: "</s>", 300: "<s>", 7: "<x>"}, 300)
    assert found.sampling.stop_token_ids == (9, 1, 2)
    assert found.sampling.stop == asked.sampling.stop


def test_an_end_of_text_that_the_target_has_no_logit_for_is_none() -> None:
    asked = GenerationRequest("r", (1,), SamplingParams(8, stop_token_ids=(5,), min_tokens=2))
    found = with_all_stop_token_ids(asked, frozenset({2, 300}), 300)
    assert found.sampling.all_stop_token_ids == (2, 5)
