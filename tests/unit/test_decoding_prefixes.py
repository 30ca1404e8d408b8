"""Prompts that go on from an earlier answer: less to compute, the same answer."""

from __future__ import annotations

from engines import TOKENIZER, make_engine, request, run, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.decoding.prefixes import FinishedRows, common_prefix

LONG = TOKENIZER.encode("Ann has 12 apples. She buys 30 more. SELECT name FROM people;" * 2)[:40]


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


def test_the_longest_match_wins_and_short_ones_are_not_worth_it() -> None:
    rows = FinishedRows(4, least=2)
    assert rows.keep([1, 2, 3, 4], running=0) == 3
    assert rows.keep([1, 2, 9], running=0) == 2
    assert rows.find([1, 2, 3, 5]) == (3, 3)
    assert rows.find([1, 2, 9, 9]) == (2, 3)
    assert rows.find([1, 7]) is None
    assert rows.keep([5], running=0) is None
    assert rows.keep([5, 6], running=4) is None
    rows.taken(3)
    assert rows.find([1, 2, 3, 5]) == (2, 2)


def test_what_says_the_same_is_replaced_and_the_oldest_goes_first() -> None:
    rows = FinishedRows(2, least=2)
    assert rows.keep([1, 2], running=0) == 1
    assert rows.keep([1, 2, 3], running=0) == 1  # says all that [1, 2] says
    assert rows.keep([4, 5], running=0) == 0
    assert rows.find([1, 2, 3]) == (1, 3)  # used: [4, 5] is older now
    assert rows.keep([6, 7], running=0) == 0
    assert rows.find([4, 5]) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_a_kept_row_is_never_a_running_one(events: list[tuple[bool, int]]) -> None:
    rows, running = FinishedRows(5, least=1), 0
    for admit, token in events:
        if admit and running < 5:
            rows.taken(running)
            running += 1
        elif not admit and running:
            kept = rows.keep([token, token + 1], running)
            running -= 1
            assert kept is None or kept > running
        assert all(row >= running for row in rows._tokens)


def test_a_conversation_goes_on_where_it_was() -> None:
    engine, plain = make_engine(max_num_seqs=3), make_engine(max_num_seqs=3)
    plain._finished = None  # type: ignore[attr-defined]
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
        assert cached == (len(history) - 4 if turn else 0)
        assert expected[f"t{turn}"][-1].chunk.num_cached_tokens == 0
        history += [*tokens_of(found[f"t{turn}"]), 7, 8, 9]


def test_a_request_that_must_not_be_stored_leaves_nothing_behind() -> None:
    engine = make_engine()
    run(engine, [request("r", LONG, store=False)])
    assert run(engine, [request("s", LONG)])["s"][-1].chunk.num_cached_tokens == 0
    assert run(engine, [request("t", LONG)])["t"][-1].chunk.num_cached_tokens == len(LONG) - 1


def test_full_rows_keep_nothing_and_stay_right() -> None:
    engine, plain = make_engine(max_num_seqs=2), make_engine(max_num_seqs=2)
    plain._finished = None  # type: ignore[attr-defined]
    asked = [request(f"r{i}", LONG[: 20 + i], max_tokens=4 + i, ignore_eos=True) for i in range(9)]
    found, expected = run(engine, asked), run(plain, asked)
    assert {n: tokens_of(o) for n, o in found.items()} == {
        n: tokens_of(o) for n, o in expected.items()
    }
