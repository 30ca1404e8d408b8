"""With little memory every request ends with the same text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import MAX_LEN, TOKENIZER, engine_of, make_engine, request, run, served, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_llama

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.kv_cache import BLOCK_SIZE
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.request import SamplingParams
from paceline.actors.speculation.experts import ExpertStack
from paceline.actors.speculation.proposer import DraftRow

WORDS = TOKENIZER.encode("SELECT name, age FROM people WHERE age > 30; Ann has 12 apples." * 4)
LEAST = -(-MAX_LEN // BLOCK_SIZE)


def twin_engine(**options: Any) -> Engine:
    """A target whose draft a is itself and whose draft b is another."""
    drafts = {"a": served(tiny_llama(1)), "b": served(tiny_llama(3))}
    return engine_of(served(tiny_llama(1)), [drafts], **options)


PLENTY = twin_engine(max_num_seqs=8)

ASKED = st.lists(
    st.tuples(
        st.integers(1, 70),  # prompt tokens
        st.integers(0, 3),  # where in the words it begins
        st.integers(1, 60),  # output tokens
        st.sampled_from([(None, 0.0), (5, 0.9), (6, 1.3)]),  # seed, temperature
        st.sampled_from([None, 0, 1, 5]),  # drafted tokens
        st.booleans(),  # stored
        st.integers(0, 6),  # rounds until it comes
    ),
    min_size=1,
    max_size=7,
)


def requests(asked: list[Any]) -> list[Any]:
    return [
        request(
            f"r{i}",
            WORDS[start : start + length],
            max_tokens=tokens,
            temperature=temperature,
            seed=seed,
            num_speculative_tokens=k,
            draft="ab"[i % 2],
            store=store,
            ignore_eos=True,
        )
        for i, (length, start, tokens, (seed, temperature), k, store, _) in enumerate(asked)
    ]


def answers(engine: Engine, asked: list[Any]) -> dict[str, list[int]]:
    """Tokens by request; requests come some rounds after each other."""
    found: dict[str, list[int]] = {}
    for one, (*_, rounds) in zip(requests(asked), asked, strict=True):
        engine.add(one)
        for _ in range(rounds):
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.chunk.token_ids)
    for name, outputs in run(engine).items():
        found.setdefault(name, []).extend(tokens_of(outputs))
    return found


@settings(max_examples=25, deadline=None)
@given(ASKED, st.integers(LEAST, 2 * LEAST), st.booleans())
def test_every_request_ends_with_its_text(
    asked: list[Any], blocks: int, prefix_cache: bool
) -> None:
    engine = twin_engine(
        max_num_seqs=5,
        kv_positions=blocks * BLOCK_SIZE,
        draft_positions=LEAST * BLOCK_SIZE,
        prefix_cache=prefix_cache,
    )
    found = answers(engine, asked)
    assert found == answers(PLENTY, asked)
    assert {name: len(tokens) for name, tokens in found.items()} == {
        f"r{i}": min(tokens, MAX_LEN - length) for i, (length, _, tokens, *_) in enumerate(asked)
    }
    for runner in (engine._runner, stack_of(engine).runner):  # type: ignore[attr-defined]
        runner.kv.allocator.check_integrity()
        assert runner.kv.allocator.num_available == runner.kv.allocator.size
    assert PLENTY.preemptions == 0


def stack_of(engine: Engine) -> Any:
    return engine.draft_runner._proposer._stacks["a"]  # type: ignore[attr-defined]


def test_the_youngest_is_preempted_and_resumes_unchanged() -> None:
    """Two that fit at first and not to their ends: the first is never held up."""
    engine = make_engine(kv_positions=LEAST * BLOCK_SIZE, k=0)
    asked = [request(f"r{i}", WORDS[i : i + 20], max_tokens=70, ignore_eos=True) for i in range(2)]
    for one in asked:
        engine.add(one)
    found: dict[str, list[int]] = {"r0": [], "r1": []}
    began: dict[str, list[int]] = {"r0": [], "r1": []}
    cached = set()
    for step in range(400):
        if not engine.has_work:
            break
        for output in engine.step():
            found[output.request_id].extend(output.chunk.token_ids)
            began[output.request_id].append(step)
            cached.add(output.chunk.num_cached_tokens)
    assert engine.preemptions >= 1
    assert began["r0"] == list(range(began["r0"][0], began["r0"][0] + 70))
    assert began["r1"][0] < began["r0"][-1] < began["r1"][-1]
    assert cached == {0}  # what it takes up again is not the client's business
    expected = run(make_engine(k=0), asked)
    assert found == {name: tokens_of(outputs) for name, outputs in expected.items()}


def test_a_preempted_request_resumes_before_later_ones() -> None:
    engine = make_engine(kv_positions=LEAST * BLOCK_SIZE, k=0)
    for i, length in enumerate((20, 21, 80)):
        engine.add(request(f"r{i}", WORDS[i : i + length], max_tokens=50, ignore_eos=True))
    while not engine.preemptions:
        engine.step()
    outputs = run(engine)
    order = list(outputs)
    assert order.index("r1") < order.index("r2")
    # It begins with a block that it has left behind: that is not what the client calls cached.
    assert {output.chunk.num_cached_tokens for output in outputs["r1"]} == {0}


def test_a_request_waits_until_its_prompt_and_first_round_fit() -> None:
    engine = make_engine(kv_positions=LEAST * BLOCK_SIZE, k=0)
    engine.add(request("long", WORDS[:64], max_tokens=30, ignore_eos=True))
    engine.add(request("next", WORDS[:32], max_tokens=3, ignore_eos=True, store=False))
    engine.add(request("short", WORDS[:4], max_tokens=3, ignore_eos=True))
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 2)  # no request overtakes another
    engine.abort("long")
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 0)
    assert set(run(engine)) == {"next", "short"}


def test_a_preempted_request_can_be_aborted() -> None:
    engine = make_engine(kv_positions=LEAST * BLOCK_SIZE, k=0)
    for i in range(2):
        engine.add(request(f"r{i}", WORDS[i : i + 20], max_tokens=70, ignore_eos=True))
    while not engine.preemptions:
        engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    engine.abort("r1")
    assert set(run(engine)) == {"r0"}
    assert engine.kv_blocks[1] == LEAST


@pytest.mark.parametrize("k", [2, 5])
def test_drafts_without_memory_cost_speed_alone(k: int) -> None:
    """The target's twin as draft, with memory for one of three: the first drafts all along."""
    engine = twin_engine(k=k, draft_positions=LEAST * BLOCK_SIZE)
    asked = [request(f"r{i}", WORDS[i : i + 40], max_tokens=50, ignore_eos=True) for i in range(3)]
    found, expected = run(engine, asked), run(make_engine(), asked)
    drafted: list[int] = []
    for name, outputs in expected.items():
        assert tokens_of(found[name]) == tokens_of(outputs)
        stats = found[name][-1].chunk.speculative
        assert stats is not None
        assert stats.num_accepted_draft_tokens == stats.num_draft_tokens
        drafted.append(stats.num_draft_tokens)
    alone = run(engine, [asked[0]])["r0"][-1].chunk.speculative
    assert alone is not None
    assert drafted[0] == alone.num_draft_tokens > max(drafted[1:])


GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def make_stack() -> ExpertStack:
    """Memory for one of two sequences."""
    runner = ModelRunner([served(tiny_llama(1))], 2, MAX_LEN, LEAST * BLOCK_SIZE)
    return ExpertStack(runner, ["a"], 2)


def test_a_row_that_drafts_less_than_its_neighbour_stays_correct() -> None:
    """What it drafts beyond its own number comes true, but its keys and values have no block."""
    (outputs,) = run(PLENTY, [request("r", WORDS[:9], max_tokens=80, ignore_eos=True)]).values()
    truth = [*WORDS[:9], *tokens_of(outputs)]
    stack, generator = make_stack(), torch.Generator()

    def propose(**rows: tuple[int, int]) -> list[list[int]]:
        asked = [DraftRow(n, "a", truth[:length], 1, k, GREEDY) for n, (length, k) in rows.items()]
        return stack.propose(asked, 4, generator).token_ids.tolist()  # type: ignore[no-any-return]

    assert propose(few=(47, 1), many=(20, 6)) == [truth[47:53], truth[20:26]]
    assert propose(few=(53, 6)) == [truth[53:59]]


def test_an_older_draft_sequence_preempts_a_younger_one() -> None:
    stack, generator = make_stack(), torch.Generator()

    def propose(*rows: tuple[str, int]) -> list[int]:
        asked = [DraftRow(name, "a", WORDS[:length], 1, 2, GREEDY) for name, length in rows]
        return stack.propose(asked, 4, generator).num_drafted.tolist()  # type: ignore[no-any-return]

    assert propose(("old", 40)) == [2]
    assert propose(("young", 40), ("old", 40)) == [2, 2]
    assert propose(("young", 41), ("old", 49)) == [0, 2]
    assert propose(("young", 41), ("old", 50)) == [0, 2]
    stack.release("old")
    assert propose(("young", 41)) == [2]
    stack.release("young")
    assert stack.runner.kv.allocator.num_available == LEAST


def test_a_long_prompt_holds_up_neither_streams_nor_short_prompts() -> None:
    engine = make_engine(k=0, prefill_chunk=4)
    engine.add(request("stream", WORDS[:3], max_tokens=60, ignore_eos=True))
    engine.step()
    engine.add(request("long", WORDS[:81], max_tokens=2, ignore_eos=True))
    engine.step()
    engine.add(request("short", WORDS[5:14], max_tokens=2, ignore_eos=True))
    first: dict[str, int] = {}
    for step in range(60):
        outputs = {output.request_id for output in engine.step()}
        assert "stream" in outputs or step > 55
        for name in outputs:
            first.setdefault(name, step)
        if {"long", "short"} <= first.keys():
            break
    assert first["short"] == 3  # 8 tokens, half of every round's 4
    assert 19 <= first["long"] <= 24  # 80 tokens, 4 a round but for those
