"""Rows and prefill shares of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.kv_cache import RowAllocator
from paceline.actors.engine.scheduler import split_prefill_budget


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_a_request_keeps_the_lowest_row_that_was_free(events: list[tuple[bool, int]]) -> None:
    table = RowAllocator(4)
    live: dict[int, int] = {}
    for add, request in events:
        if add and request not in live and not table.full:
            row = table.allocate(request)
            assert row == min(set(range(4)) - set(live.values()))
            live[request] = row
        elif not add and request in live:
            assert table.free(request) == live.pop(request)
        assert {request: table.row(request) for request in live} == live
        assert len(table) == len(live)
        assert table.full == (len(live) == 4)


def test_a_full_allocator_raises() -> None:
    table = RowAllocator(1)
    table.allocate("a")
    with pytest.raises(RuntimeError, match="1 rows are taken"):
        table.allocate("b")
    with pytest.raises(KeyError):
        table.row("b")
    table.free("a")
    with pytest.raises(KeyError):
        table.free("a")


@given(st.lists(st.integers(1, 300), max_size=8), st.integers(1, 64))
def test_prefill_starves_neither_long_nor_short(lacking: list[int], budget: int) -> None:
    shares = split_prefill_budget(lacking, budget)
    assert len(shares) == len(lacking)
    assert all(0 <= share <= lack for share, lack in zip(shares, lacking, strict=True))
    assert sum(shares) == min(budget, sum(lacking))
    if lacking:
        assert shares[0] >= min(lacking[0], (budget + 1) // 2)
    for i, mine in enumerate(lacking[1:], 1):
        shorter = [s for s, lack in zip(shares[1:], lacking[1:], strict=True) if lack > mine]
        assert shares[i] == mine or not any(shorter)
