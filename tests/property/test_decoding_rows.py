"""The row table stays dense and its moves keep every request's keys with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.decoding.kv import KVRows, RowTable


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_rows_stay_dense_and_data_follows(events: list[tuple[bool, int]]) -> None:
    table, rows = RowTable(4), KVRows([(1, 2)], 4, 3, torch.float32, "cpu")
    live: set[int] = set()
    for add, request in events:
        if add and request not in live and not table.full:
            row = table.add(request)
            rows.keys[0][row] = float(request)
            live.add(request)
        elif not add and request in live:
            moved = table.release(request)
            live.discard(request)
            if moved is not None:
                rows.move(moved[1], moved[2], 3)
        assert sorted(table.row(r) for r in live) == list(range(len(live)))
        assert len(table) == len(live)
        for r in live:
            assert (rows.keys[0][table.row(r)] == float(r)).all()


def test_a_full_table_refuses() -> None:
    table = RowTable(1)
    table.add("a")
    with pytest.raises(RuntimeError, match="1 rows are taken"):
        table.add("b")
    with pytest.raises(KeyError):
        table.row("b")
