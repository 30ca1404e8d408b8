"""Prompts that continue an earlier answer: less to compute, the same answer."""

from __future__ import annotations

from typing import Any

import pytest
from engines import TOKENIZER, make_engine, request, run, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.kv_cache import BLOCK_SIZE, PrefixCache

LONG = TOKENIZER.encode("Ann has 12 apples. She buys 30 more. SELECT name FROM people;" * 2)[:40]


def test_the_longest_prefix_of_whole_blocks_matches() -> None:
    index = PrefixCache(2)
    assert index.insert([1, 2, 3, 4, 5], [7, 8]) == [7, 8]
    assert index.match([1, 2, 3, 4, 5, 6]) == [7, 8]
    assert index.match([1, 2, 3, 9]) == [7]
    assert index.match([1]) == index.match([3, 4]) == index.match([]) == []
    assert index.insert([1, 2, 9, 9], [5, 6]) == [6]  # 7 holds what 5 does
    assert index.match([1, 2, 9, 9]) == [7, 6]


def test_descendants_of_a_removed_block_are_not_found_behind_its_successor() -> None:
    index = PrefixCache(2)
    index.insert([1, 2, 3, 4], [7, 8])
    index.remove(7)
    index.remove(7)
    assert index.match([1, 2, 3, 4]) == []
    index.insert([5, 6], [7])
    assert index.match([5, 6, 3, 4]) == [7]
    index.insert([1, 2, 3, 4], [9, 8])
    assert index.match([1, 2, 3, 4]) == [9, 8]
    assert len(index) == 3
    index.clear()
    assert index.match([5, 6]) == []


def test_a_conversation_reuses_its_kv() -> None:
    engine, plain = make_engine(), make_engine(prefix_cache=False)
    history = list(LONG)
    for turn in range(3):
        asked = [
            request(f"t{turn}", history, max_tokens=8, ignore_eos=True),
            request(f"o{turn}", LONG[turn:], max_tokens=5 + turn, ignore_eos=True),
        ]
        found, expected = run(engine, asked), run(plain, asked)
        for name, outputs in expected.items():
            assert tokens_of(found[name]) == tokens_of(outputs)
        cached = found[f"t{turn}"][-1].chunk.num_cached_tokens
        computed = len(history) - 4 if turn else 0  # all but the last answer token and 7, 8, 9
        assert cached == computed // BLOCK_SIZE * BLOCK_SIZE
        assert cached > 0 or not turn
        assert expected[f"t{turn}"][-1].chunk.num_cached_tokens == 0
        history += [*tokens_of(found[f"t{turn}"]), 7, 8, 9]


@pytest.mark.parametrize(("rounds", "cached"), [(2, 16), (16, 48)])
def test_what_a_client_waited_for_too_long_is_not_computed_again(rounds: int, cached: int) -> None:
    """Two rounds compute 16 tokens of the prompt; after 16 it has been answered in part."""
    engine, plain = make_engine(k=0), make_engine(prefix_cache=False)
    engine.add(request("r", LONG, max_tokens=30, ignore_eos=True, num_speculative_tokens=0))
    found = [
        token for _ in range(rounds) for output in engine.step() for token in output.chunk.token_ids
    ]
    engine.abort("r")
    assert len(engine.step()) == 0
    asked = [request("s", [*LONG, *found], max_tokens=8, ignore_eos=True)]
    again = run(engine, asked)["s"]
    assert again[-1].chunk.num_cached_tokens == cached
    assert tokens_of(again) == tokens_of(run(plain, asked)["s"])


def test_a_request_with_store_false_is_not_cached() -> None:
    engine = make_engine()
    run(engine, [request("r", LONG, store=False)])
    assert run(engine, [request("s", LONG)])["s"][-1].chunk.num_cached_tokens == 0
    again = run(engine, [request("t", LONG), request("u", LONG, store=False)])
    assert [again[name][-1].chunk.num_cached_tokens for name in "tu"] == [32, 32]


def test_requests_share_blocks_only_with_those_of_the_same_salt() -> None:
    engine, plain = make_engine(), make_engine(prefix_cache=False)
    asked = [
        request(name, LONG, cache_salt=salt)
        for name, salt in (("a", "A"), ("b", "B"), ("c", ""), ("a2", "A"), ("b2", "B"), ("c2", ""))
    ]
    found = {name: outputs for one in asked for name, outputs in run(engine, [one]).items()}
    expected = run(plain, asked)
    assert {name: tokens_of(o) for name, o in found.items()} == {
        name: tokens_of(o) for name, o in expected.items()
    }
    cached = [found[one.request_id][-1].chunk.num_cached_tokens for one in asked]
    assert cached == [0, 0, 0, 32, 32, 32]


def test_an_unrecorded_request_is_cached() -> None:
    engine = make_engine()
    assert run(engine, [request("r", LONG, recorded=False)])["r"][-1].record is None
    found = run(engine, [request("s", LONG)])["s"][-1]
    assert found.record is not None
    assert found.chunk.num_cached_tokens == 32


def test_a_failed_target_caches_nothing() -> None:
    engine = make_engine()
    run(engine, [request("r", LONG)])
    engine.add(request("s", LONG))
    engine.step()
    engine.fail_all()
    assert run(engine, [request("t", LONG)])["t"][-1].chunk.num_cached_tokens == 0


def test_an_emptied_cache_is_of_no_effect_on_what_runs() -> None:
    engine, plain = make_engine(), make_engine(prefix_cache=False)
    run(engine, [request("r", LONG)])
    asked = [request("s", LONG, max_tokens=30, ignore_eos=True), request("t", LONG)]
    engine.add(asked[0])
    started = engine.step()
    engine.reset_prefix_cache()
    found, expected = run(engine, [asked[1]]), run(plain, asked)
    assert tokens_of(started + found["s"]) == tokens_of(expected["s"])
    assert tokens_of(found["t"]) == tokens_of(expected["t"])
    assert found["s"][-1].chunk.num_cached_tokens == 32
    assert found["t"][-1].chunk.num_cached_tokens == 0
    assert run(engine, [request("u", LONG)])["u"][-1].chunk.num_cached_tokens == 32
    assert engine.kv_blocks == (24, 24)


def test_an_emptied_cache_stays_without_the_requests_of_before() -> None:
    """Those that run, and one that is put off, whose keys are computed again."""
    engine = make_engine(kv_positions=112, prefill_chunk=64, k=0)
    prompts = [[*range(start, start + 33)] for start in (20, 60, 100)]
    for i, prompt in enumerate(prompts):
        engine.add(request(f"r{i}", prompt, max_tokens=20, ignore_eos=True))
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    engine.reset_prefix_cache()
    run(engine)
    assert engine.preemptions > 0
    later = [request(f"l{i}", prompt) for i, prompt in enumerate(prompts)]
    found = [run(engine, [one])[one.request_id][-1] for one in later]
    assert [output.chunk.num_cached_tokens for output in found] == [0, 0, 0]


def test_running_requests_share_the_blocks_of_their_prompt() -> None:
    engine = make_engine(prefill_chunk=64)
    engine.add(request("first", LONG, max_tokens=30, ignore_eos=True))
    engine.step()
    free = engine.kv_blocks[1]
    asked = [request(f"r{i}", [*LONG, i], max_tokens=4, ignore_eos=True) for i in range(3)]
    for one in asked:
        engine.add(one)
    outputs = engine.step()
    assert {o.chunk.num_cached_tokens for o in outputs if o.request_id != "first"} == {32}
    assert free - engine.kv_blocks[1] == 3  # one more for each, three are shared by all
    found, expected = run(engine), run(make_engine(prefix_cache=False), asked)
    for output in reversed(outputs):
        found.setdefault(output.request_id, []).insert(0, output)
    for name, outputs in expected.items():
        assert tokens_of(found[name]) == tokens_of(outputs)
    assert engine.kv_blocks == (24, 24)


def computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prompt tokens of each call of the target from now on."""
    counts: list[int] = []
    prefill, run_ragged = engine._runner.prefill, engine._runner._run_ragged

    def counted(row: int, tokens: list[int], *others: Any, **named: Any) -> Any:
        counts.append(len(tokens))
        return prefill(row, tokens, *others, **named)

    def counted_ragged(*others: Any) -> Any:
        counts.append(sum(len(prompt.token_ids) for prompt in others[-1]))
        return run_ragged(*others)

    monkeypatch.setattr(engine._runner, "prefill", counted)
    monkeypatch.setattr(engine._runner, "_run_ragged", counted_ragged)
    return counts


@pytest.mark.parametrize("chunk", [8, 20, 64])
def test_prompts_that_come_together_compute_what_they_share_once(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """As the choices of one request do, and conversations that begin with the same words."""
    engine, plain = make_engine(prefill_chunk=chunk), make_engine(prefix_cache=False)
    counts = computed(engine, monkeypatch)
    asked = [
        *(request(f"n{i}", LONG, max_tokens=6, ignore_eos=True) for i in range(3)),
        request("other", [*LONG[:20], *range(30, 60)], max_tokens=6, ignore_eos=True),
    ]
    found, expected = run(engine, asked), run(plain, asked)
    for name, outputs in expected.items():
        assert tokens_of(found[name]) == tokens_of(outputs)
    assert [found[one.request_id][-1].chunk.num_cached_tokens for one in asked] == [0, 32, 32, 16]
    assert sum(counts) == 39 + 7 + 7 + 33
    assert engine.prefix_cache == (3 * 40 + 50, 80)
    assert engine.kv_blocks == (24, 24)


def test_what_a_preempted_prompt_takes_is_not_counted_again() -> None:
    engine = make_engine(prefill_chunk=20, k=0)
    for name in ("first", "second"):
        engine.add(request(name, LONG))
    engine.step()  # 20 tokens of the first, of which the second takes 16
    for sequence in reversed([*engine._scheduler.running.values()]):
        engine._scheduler._preempt(sequence)
    engine.reset_prefix_cache()  # as if their blocks had been needed
    for sequence in engine._scheduler.waiting:
        sequence.cacheable = True
    found = run(engine)
    assert [found[name][-1].chunk.num_cached_tokens for name in ("first", "second")] == [0, 16]
    assert engine.prefix_cache == (80, 16)


def test_what_a_prompt_has_computed_serves_those_that_come_later() -> None:
    engine = make_engine(prefill_chunk=20)
    engine.add(request("first", LONG))
    engine.step()  # 20 of its 39 tokens
    assert run(engine, [request("second", LONG)])["second"][-1].chunk.num_cached_tokens == 32


def test_nothing_waits_for_what_it_may_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(prefill_chunk=64)
    counts = computed(engine, monkeypatch)
    found = run(engine, [request(f"r{i}", LONG, store=False) for i in range(2)])
    found |= run(engine, [request(f"s{i}", LONG, cache_salt=str(i)) for i in range(2)])
    found |= run(engine, [request("all", LONG, prompt_logprobs=0), request("rest", LONG)])
    assert [found[name][-1].chunk.num_cached_tokens for name in ("r1", "s1", "all")] == [0, 0, 0]
    assert found["rest"][-1].chunk.num_cached_tokens == 32
    assert sum(counts) == 5 * 39 + 7


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 2), st.booleans()),
        min_size=2,
        max_size=9,
    ),
    st.sampled_from([4, 8, 24]),
)
def test_prompts_that_share_and_wait_end_as_they_would_alone(
    asked: list[tuple[int, int, int, bool]], chunk: int
) -> None:
    """Prompts of a few beginnings, lengths and arrivals, in memory that is short."""
    sizes = {"prefill_chunk": chunk, "kv_positions": 160}
    engine, plain = make_engine(**sizes), make_engine(prefix_cache=False)
    outputs = []
    requests = [
        request(
            f"r{i}",
            [(n // 16 * branch + n) % 290 + 5 for n in range(length)],
            max_tokens=5,
            ignore_eos=True,
            store=store,
        )
        for i, (branch, length, _, store) in enumerate(asked)
    ]
    for one, (_, _, rounds, _) in zip(requests, asked, strict=True):
        engine.add(one)
        for _ in range(rounds):
            outputs += engine.step()
    while engine.has_work:
        outputs += engine.step()
    expected = run(plain, requests)
    for one in requests:
        own = [output for output in outputs if output.request_id == one.request_id]
        assert tokens_of(own) == tokens_of(expected[one.request_id])
    assert engine.kv_blocks == (10, 10)


def test_cached_blocks_are_evicted_when_memory_is_needed() -> None:
    engine, plain = make_engine(kv_positions=96), make_engine(prefix_cache=False)
    asked = [request(f"r{i}", LONG[i:], max_tokens=4 + i, ignore_eos=True) for i in range(9)]
    found, expected = run(engine, asked), run(plain, asked)
    assert {n: tokens_of(o) for n, o in found.items()} == {
        n: tokens_of(o) for n, o in expected.items()
    }
    last = run(engine, [request("again", LONG[8:])])["again"]
    assert last[-1].chunk.num_cached_tokens == 16
    first = run(engine, [request("first", LONG)])["first"]
    assert first[-1].chunk.num_cached_tokens == 0
