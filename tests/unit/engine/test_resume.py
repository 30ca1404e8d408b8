"""Requests resumed by another engine: the same answer, whatever was sent before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import TOKENIZER, make_engine, request, run, tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.actors.engine.engine import StepOutput
from paceline.actors.engine.request import GenerationRequest

PROMPT = TOKENIZER.encode("Ann has 12 apples. She buys 30 more. How many", add_special_tokens=False)
ANY = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def text_of(outputs: list[StepOutput]) -> str:
    return "".join(output.chunk.text for output in outputs)


def resumed(
    asked: GenerationRequest, seen: list[StepOutput], attempt: int = 1
) -> GenerationRequest:
    return replace(
        asked,
        output_token_ids=tuple(tokens_of(seen)),
        sent_chars=len(text_of(seen)),
        attempt=attempt,
    )


def check_every_break(asked: GenerationRequest, k: int, breaks: list[int]) -> None:
    """Broken after any round, the rest comes from an engine that knows nothing of the first."""
    whole = run(make_engine(k=k), [asked])["r"]
    for at in breaks:
        seen = whole[: min(at, len(whole) - 1)]
        # another k, another crowd: the other replica's own state
        engine = make_engine(k=(k + 3) % 6)
        again = resumed(asked, seen)
        rest = run(engine, [request("other", PROMPT[:5]), again])[again.run_id]
        assert tokens_of(seen) + tokens_of(rest) == tokens_of(whole)
        assert text_of(seen) + text_of(rest) == text_of(whole)
        assert rest[-1].chunk.finish_reason == whole[-1].chunk.finish_reason
        assert all(output.record is None for output in rest) or not tokens_of(seen)


@ANY
@given(
    st.integers(0, 5),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.sampled_from([None, 7, 2**40]),
    st.integers(1, 40),
)
def test_a_resumed_answer_is_the_undisturbed_one(
    k: int, breaks: list[int], seed: int | None, max_tokens: int
) -> None:
    temperature = 0.0 if seed is None else 0.9
    asked = request("r", PROMPT, max_tokens=max_tokens, temperature=temperature, seed=seed)
    check_every_break(asked, k, breaks)


@ANY
@given(st.integers(0, 5), st.lists(st.integers(0, 40), min_size=1, max_size=3), st.data())
def test_text_held_back_for_a_stop_string_is_sent_once_after_a_resume(
    k: int, breaks: list[int], data: st.DataObject
) -> None:
    asked = request("r", PROMPT, max_tokens=40, ignore_eos=True)
    text = text_of(run(make_engine(k=k), [asked])["r"])
    start = data.draw(st.integers(0, len(text) - 2))
    stops = [text[start : start + data.draw(st.integers(2, 6))]]
    stops.append(text[data.draw(st.integers(0, len(text) - 1)) :][:3] + "never")
    check_every_break(
        replace(asked, sampling=replace(asked.sampling, stop=tuple(stops))), k, breaks
    )


@pytest.mark.full
def test_half_a_character_is_held_back_over_a_resume() -> None:
    """Bytes of one character on both sides: with temperature, random bytes come all the time."""
    for seed in range(3):
        asked = request("r", PROMPT, max_tokens=30, temperature=2.0, seed=seed, ignore_eos=True)
        assert "�" in text_of(run(make_engine(k=0), [asked])["r"])
        check_every_break(asked, 0, list(range(30)))


@pytest.mark.parametrize("fields", [{"max_tokens": 9}, {"max_tokens": 30, "ignore_eos": False}])
def test_output_that_already_ends_the_answer_ends_it_at_once(fields: dict[str, object]) -> None:
    answer = tokens_of(run(make_engine(), [request("r", PROMPT, max_tokens=30)])["r"])
    eos = answer[8]
    count = answer.index(eos) + 1
    asked = request("r", PROMPT, **fields)
    ended = replace(asked, output_token_ids=tuple(answer[:count]), sent_chars=3, attempt=2)
    if count < 9:
        ended = replace(ended, output_token_ids=tuple(answer[:9]))
    outputs = run(make_engine(eos=eos), [ended, request("next", PROMPT)])
    (last,) = outputs["r#2"]
    assert last.chunk.finish_reason == "stop"
    assert last.chunk.token_ids == ()
    assert outputs["next"][-1].chunk.finish_reason is not None
    length = replace(ended, sampling=replace(ended.sampling, ignore_eos=True, max_tokens=count))
    (last,) = run(make_engine(eos=eos), [length])["r#2"]
    assert last.chunk.finish_reason == "length"
    shown = TOKENIZER.decode(answer[:count], skip_special_tokens=True)
    assert last.chunk.text == shown[3:]


def test_a_long_resumed_prefix_is_read_in_chunks_beside_running_streams() -> None:
    engine = make_engine(k=0, prefill_chunk=8)
    engine.add(request("running", PROMPT[:4], max_tokens=60, ignore_eos=True))
    engine.step()
    asked = request("r", PROMPT, max_tokens=50, ignore_eos=True)
    whole = run(make_engine(k=0), [asked])["r"]
    engine.add(resumed(asked, whole[:40]))
    rounds = []
    while not any(output.request_id == "r#1" for output in rounds[-1:] for output in output):
        rounds.append(engine.step())
        assert any(output.request_id == "running" for output in rounds[-1])
        assert len(rounds) < 20
    assert len(rounds) >= (len(PROMPT) + 39) // 8
    rest = [o for outputs in rounds for o in outputs if o.request_id == "r#1"]
    rest += run(engine).get("r#1", [])
    assert tokens_of(rest) == tokens_of(whole)[40:]


def test_cached_tokens_are_the_prompts_alone() -> None:
    engine = make_engine()
    asked = request("r", PROMPT, max_tokens=20, ignore_eos=True)
    seen = run(engine, [asked])["r"]
    rest = run(engine, [resumed(asked, seen[:-1])])["r#1"]
    assert rest[-1].chunk.num_cached_tokens == len(PROMPT)


def test_the_dying_attempt_does_not_end_the_one_that_follows_on_the_same_replica() -> None:
    engine = make_engine()
    asked = request("r", PROMPT, max_tokens=20, ignore_eos=True)
    engine.add(asked)
    engine.step()
    engine.add(replace(asked, attempt=1))
    engine.step()
    engine.abort("r")
    assert tokens_of(run(engine)["r#1"]) != []
    assert engine.num_running == 0


def test_logprobs_and_text_offsets_continue_after_a_resume() -> None:
    asked = request("r", PROMPT, max_tokens=24, ignore_eos=True, logprobs=2)
    whole = run(make_engine(k=3), [asked])["r"]

    def entries(outputs: list[StepOutput]) -> list[tuple[int, tuple[int, ...]]]:
        found = [item for output in outputs for item in output.chunk.logprobs or ()]
        assert len(found) == len(tokens_of(outputs))
        return [(item.text_offset, tuple(token for token, _ in item.top)) for item in found]

    for at in range(1, len(whole)):
        rest = run(make_engine(k=1), [resumed(asked, whole[:at])])["r#1"]
        assert entries(whole[:at]) + entries(rest) == entries(whole)
