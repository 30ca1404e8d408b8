"""Blocks: never in two owners unless shared, never lost; kept ones are given up oldest first."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.kv_cache import BlockPool, KVBlocks, PrefixIndex

EVENTS = st.lists(
    st.tuples(st.sampled_from(["take", "share", "release", "remember"]), st.integers(0, 7)),
    max_size=60,
)


@given(st.integers(1, 6), EVENTS)
def test_a_block_has_as_many_owners_as_hold_it(size: int, events: list[tuple[str, int]]) -> None:
    pool = BlockPool(size)
    held: list[list[int]] = []
    for event, number in events:
        if event == "take":
            if number > pool.available:
                with pytest.raises(RuntimeError, match="are available"):
                    pool.take(number)
            else:
                held.append(pool.take(number))
        elif held:
            own = held[number % len(held)]
            if event == "share":
                pool.share(own)
                held.append(list(own))
            elif event == "remember":
                pool.remember(own)
            else:
                held.remove(own)
                pool.release(own)
        pool.check_integrity()
        counts = [sum(block in own for own in held) for block in range(size + 1)]
        assert [pool.owners(block) for block in range(size + 1)] == counts
        assert pool.available == size - sum(count > 0 for count in counts[1:])
    for own in held:
        pool.release(own)
    assert pool.available == size
    assert sorted(pool.take(size)) == list(range(1, size + 1))


def test_idle_blocks_are_given_up_last_and_the_oldest_first() -> None:
    pool = BlockPool(4)
    a, b, c = pool.take(1), pool.take(1), pool.take(1)
    pool.remember([*a, *b])
    for own in (b, c, a):
        pool.release(own)
    assert pool.available == 4
    assert {*pool.take(2)}.isdisjoint({*a, *b})  # the free ones
    pool.share(b)
    pool.release(b)  # used just now
    assert pool.take(1) == a
    pool.forget_all()
    pool.check_integrity()
    assert pool.take(1) == b


def test_what_is_free_cannot_be_shared_or_released() -> None:
    pool = BlockPool(2)
    with pytest.raises(RuntimeError, match="is free"):
        pool.share([1])
    with pytest.raises(RuntimeError, match="no owner"):
        pool.release([1])


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), max_size=7)), max_size=30),
)
def test_a_prefix_is_found_where_and_only_where_its_tokens_are(
    events: list[tuple[bool, list[int]]],
) -> None:
    """Against a plain table of what every block holds with all before it."""
    index, serial = PrefixIndex(2), itertools.count(1)
    holds: dict[int, tuple[int, ...]] = {}
    for add, tokens in events:
        if add:
            blocks = [next(serial) for _ in range(len(tokens) // 2)]
            for i, block in enumerate(blocks):
                if block in index.add(tokens[: 2 * i + 2], blocks):
                    holds[block] = tuple(tokens[: 2 * i + 2])
        elif holds:
            block = sorted(holds)[len(tokens) % len(holds)]
            index.forget(block)
            del holds[block]
        assert len(index) == len(holds)
        found = index.match(tokens)
        for i, block in enumerate(found):
            assert holds[block] == tuple(tokens[: 2 * i + 2])
        if len(tokens) >= 2 and not found:
            assert tuple(tokens[:2]) not in holds.values()


ROWS, SIZE, CAPACITY = 3, 16, 48


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "grow", "keep", "release"]),
            st.integers(0, ROWS - 1),
            st.integers(1, CAPACITY),
            st.integers(0, 1),
        ),
        max_size=60,
    ),
    st.integers(3, 5),
)
def test_every_row_reads_what_it_wrote(
    events: list[tuple[str, int, int, int]], blocks: int
) -> None:
    """Rows write the token of a position wherever their table says; all find their own again."""
    kv = KVBlocks([(1, 1)], ROWS, CAPACITY, torch.float32, "cpu", positions=blocks * SIZE)
    stored = kv.keys[0].view(-1)
    tokens: dict[int, list[int]] = {}

    def slots(row: int, start: int, end: int) -> torch.Tensor:
        at = torch.arange(start, end)
        return kv.tables[row].long()[at // SIZE] * SIZE + at % SIZE

    def write(row: int, start: int, end: int) -> None:
        stored[slots(row, start, end)] = torch.tensor(tokens[row][start:end], dtype=torch.float32)

    for event, row, length, kind in events:
        if event == "begin" and row not in tokens:
            wanted = [kind * 100 + i for i in range(length)]
            known = kv.begin(row, wanted, length)
            if known is None:
                assert kv.blocks(row) == ()
                continue
            tokens[row] = wanted
            assert known % SIZE == 0
            write(row, known, length)
        elif row not in tokens:
            continue
        elif event == "grow" and length > (before := len(tokens[row])):
            if kv.reserve(row, length):
                tokens[row] += [kind * 100 + row for _ in range(length - before)]
                write(row, before, length)
        elif event == "keep":
            kv.keep(row, tokens[row])
        elif event == "release":
            kv.release(row)
            del tokens[row]
            assert not kv.tables[row].any()
        kv.pool.check_integrity()
        for own, expected in tokens.items():
            assert kv.holds(own, len(expected))
            assert stored[slots(own, 0, len(expected))].tolist() == expected
    assert not kv.keys[0][0].any()
    for row in list(tokens):
        kv.release(row)
    assert kv.pool.available == kv.pool.size == blocks


def test_of_what_is_kept_the_end_is_given_up_first() -> None:
    kv = KVBlocks([(1, 1)], 2, 48, torch.float32, "cpu", positions=48)
    tokens = list(range(48))
    assert kv.begin(0, tokens, 48) == 0
    kv.keep(0, tokens)
    kv.release(0)
    assert kv.begin(1, [7], 16) == 0
    assert kv.begin(0, tokens, 32) == 32
    kv.pool.check_integrity()


def test_blocks_that_are_kept_and_shared_leave_no_room_twice() -> None:
    """Two idle blocks are known, and one more is wanted: they do not count as available too."""
    kv = KVBlocks([(1, 1)], 2, 48, torch.float32, "cpu", positions=48)
    tokens = list(range(48))
    assert kv.begin(0, tokens, 32) == 0
    kv.keep(0, tokens[:32])
    kv.release(0)
    assert kv.reserve(1, 16)
    assert kv.begin(0, tokens, 48) is None
    assert kv.begin(0, tokens, 32, spare=1) is None
    assert kv.begin(0, tokens, 32) == 32


def test_memory_for_less_than_a_request_is_refused() -> None:
    with pytest.raises(ValueError, match="less than one request"):
        KVBlocks([(1, 1)], 2, 33, torch.float32, "cpu", positions=32)
    kv = KVBlocks([(1, 1)], 2, 33, torch.float32, "cpu", positions=48)
    assert kv.reserve(0, 1000)
    assert not kv.reserve(1, 1)
    assert kv.begin(1, [], 1) is None
