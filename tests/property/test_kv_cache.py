"""Blocks are used by one row unless shared, never lost, and evicted oldest first."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.kv_cache import BlockAllocator, KVCache, PrefixCache

EVENTS = st.lists(
    st.tuples(st.sampled_from(["allocate", "touch", "free", "cache"]), st.integers(0, 7)),
    max_size=60,
)


@given(st.integers(1, 6), EVENTS)
def test_ref_counts_equal_the_rows_that_hold_a_block(
    size: int, events: list[tuple[str, int]]
) -> None:
    allocator = BlockAllocator(size)
    held: list[list[int]] = []
    for event, number in events:
        if event == "allocate":
            if number > allocator.num_available:
                with pytest.raises(RuntimeError, match="are available"):
                    allocator.allocate(number)
            else:
                held.append(allocator.allocate(number))
        elif held:
            own = held[number % len(held)]
            if event == "touch":
                allocator.touch(own)
                held.append(list(own))
            elif event == "cache":
                allocator.cache(own)
            else:
                held.remove(own)
                allocator.free(own)
        allocator.check_integrity()
        counts = [sum(block in own for own in held) for block in range(size + 1)]
        assert [allocator.ref_count(block) for block in range(size + 1)] == counts
        assert allocator.num_available == size - sum(count > 0 for count in counts[1:])
    for own in held:
        allocator.free(own)
    assert allocator.num_available == size
    assert sorted(allocator.allocate(size)) == list(range(1, size + 1))


def test_idle_blocks_are_evicted_last_and_the_oldest_first() -> None:
    allocator = BlockAllocator(4)
    a, b, c = allocator.allocate(1), allocator.allocate(1), allocator.allocate(1)
    allocator.cache([*a, *b])
    for own in (b, c, a):
        allocator.free(own)
    assert allocator.num_available == 4
    assert {*allocator.allocate(2)}.isdisjoint({*a, *b})  # the free ones
    allocator.touch(b)
    allocator.free(b)  # used just now
    assert allocator.allocate(1) == a
    allocator.reset_cache()
    allocator.check_integrity()
    assert allocator.allocate(1) == b


def test_free_blocks_cannot_be_touched_or_freed() -> None:
    allocator = BlockAllocator(2)
    with pytest.raises(RuntimeError, match="is free"):
        allocator.touch([1])
    with pytest.raises(RuntimeError, match="no reference"):
        allocator.free([1])


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), max_size=7)), max_size=30),
)
def test_a_prefix_matches_if_and_only_if_its_tokens_do(
    events: list[tuple[bool, list[int]]],
) -> None:
    """Against a plain table of what every block holds with all before it."""
    index, serial = PrefixCache(2), itertools.count(1)
    holds: dict[int, tuple[int, ...]] = {}
    for add, tokens in events:
        if add:
            blocks = [next(serial) for _ in range(len(tokens) // 2)]
            for i, block in enumerate(blocks):
                if block in index.insert(tokens[: 2 * i + 2], blocks):
                    holds[block] = tuple(tokens[: 2 * i + 2])
        elif holds:
            block = sorted(holds)[len(tokens) % len(holds)]
            index.remove(block)
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
            st.sampled_from(["start", "grow", "cache", "free", "reset"]),
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
    kv = KVCache([(1, 1)], ROWS, CAPACITY, torch.float32, "cpu", positions=blocks * SIZE)
    stored = kv.keys[0].view(-1)
    tokens: dict[int, list[int]] = {}

    def slots(row: int, start: int, end: int) -> torch.Tensor:
        at = torch.arange(start, end)
        return kv.block_tables[row].long()[at // SIZE] * SIZE + at % SIZE

    def write(row: int, start: int, end: int) -> None:
        stored[slots(row, start, end)] = torch.tensor(tokens[row][start:end], dtype=torch.float32)

    for event, row, length, kind in events:
        if event == "start" and row not in tokens:
            wanted = [kind * 100 + i for i in range(length)]
            known = kv.allocate_with_prefix(row, wanted, length)
            if known is None:
                assert kv.blocks(row) == ()
                continue
            tokens[row] = wanted
            assert known % SIZE == 0
            write(row, known, length)
        elif event == "reset":
            kv.reset_prefix_cache()
            assert len(kv._prefixes) == 0
        elif row not in tokens:
            continue
        elif event == "grow" and length > (before := len(tokens[row])):
            if kv.allocate(row, length):
                tokens[row] += [kind * 100 + row for _ in range(length - before)]
                write(row, before, length)
        elif event == "cache":
            kv.cache_prefix(row, tokens[row])
        elif event == "free":
            kv.free(row)
            del tokens[row]
            assert not kv.block_tables[row].any()
        kv.allocator.check_integrity()
        for own, expected in tokens.items():
            assert kv.is_allocated(own, len(expected))
            assert stored[slots(own, 0, len(expected))].tolist() == expected
    assert not kv.keys[0][0].any()
    for row in list(tokens):
        kv.free(row)
    assert kv.allocator.num_available == kv.allocator.size == blocks


def test_the_end_of_a_cached_prefix_is_evicted_first() -> None:
    kv = KVCache([(1, 1)], 2, 48, torch.float32, "cpu", positions=48)
    tokens = list(range(48))
    assert kv.allocate_with_prefix(0, tokens, 48) == 0
    kv.cache_prefix(0, tokens)
    kv.free(0)
    assert kv.allocate_with_prefix(1, [7], 16) == 0
    assert kv.allocate_with_prefix(0, tokens, 32) == 32
    kv.allocator.check_integrity()


def test_matched_idle_blocks_do_not_count_as_available() -> None:
    """Two idle blocks match, and one more is wanted."""
    kv = KVCache([(1, 1)], 2, 48, torch.float32, "cpu", positions=48)
    tokens = list(range(48))
    assert kv.allocate_with_prefix(0, tokens, 32) == 0
    kv.cache_prefix(0, tokens[:32])
    kv.free(0)
    assert kv.allocate(1, 16)
    assert kv.allocate_with_prefix(0, tokens, 48) is None
    assert kv.allocate_with_prefix(0, tokens, 32, watermark=1) is None
    assert kv.allocate_with_prefix(0, tokens, 32) == 32


def test_a_cache_smaller_than_a_request_is_refused() -> None:
    with pytest.raises(ValueError, match="less than one request"):
        KVCache([(1, 1)], 2, 33, torch.float32, "cpu", positions=32)
    kv = KVCache([(1, 1)], 2, 33, torch.float32, "cpu", positions=48)
    assert kv.allocate(0, 1000)
    assert not kv.allocate(1, 1)
    assert kv.allocate_with_prefix(1, [], 1) is None


@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 15),
)
def test_a_prefix_is_kept_up_to_the_block_that_is_not_finite(
    dtype: torch.dtype, value: float, part: int, block: int, position: int
) -> None:
    """Whatever layer or kind of state it is in; large numbers that are finite do no harm."""
    kv = KVCache([(1, 3)] * 2, 1, 48, dtype, "cpu", hidden_size=5)
    tokens = list(range(48))
    assert kv.allocate(0, 48)
    for own in (*kv.keys, *kv.values, kv.hidden):
        assert own is not None
        own.fill_(torch.finfo(dtype).max)
    poisoned = (kv.keys[1], kv.values[0], kv.hidden)[part]
    assert poisoned is not None
    poisoned[kv.blocks(0)[block], position].flatten()[-1] = value
    kv.cache_prefix(0, tokens)
    kv.free(0)
    assert kv.allocate_with_prefix(0, tokens, 48) == 16 * block
