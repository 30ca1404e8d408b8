"""The suffix index against a search through all texts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.actors.speculation.suffix.index import (
    MAX_MATCH,
    SEPARATOR,
    Match,
    SuffixIndex,
)
from paceline.actors.speculation.suffix.store import (
    ALL_TOKENS,
    LEAST_TOKENS,
    TOPIC_TOKENS,
    SuffixStore,
)

LEAST_MATCH, CANDIDATES = 2, 48
_TOKENS_AT = 5 * 8  # in suffixes.h, behind five integers
TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=5)


def longest_match(text: Sequence[int], context: Sequence[int], end: int) -> int:
    """How many of the last tokens of ``context`` are those before ``end``."""
    length = 0
    while (
        length < min(end, len(context), MAX_MATCH)
        and context[-1 - length] != SEPARATOR
        and text[end - 1 - length] == context[-1 - length]
    ):
        length += 1
    return length


def searched(text: Sequence[int], context: Sequence[int], most: int, own: bool) -> Match | None:
    """What `SuffixIndex.find` should find, the latest place first."""
    ends = [e for e in range(1, len(text)) if text[e] != SEPARATOR]
    lengths = {e: longest_match(text, context, e) for e in ends}
    longest = max(lengths.values(), default=0)
    if longest < LEAST_MATCH:
        return None
    places = [e for e in reversed(ends) if lengths[e] == longest]
    tokens: list[int] = []
    votes, voters = [], []
    while places and len(tokens) < most:
        going = [*text, *tokens] if own else text
        nexts = {
            e: going[e + len(tokens)]
            for e in places
            if e + len(tokens) < len(going) and going[e + len(tokens)] != SEPARATOR
        }
        if not nexts:
            break
        token, count = Counter(nexts.values()).most_common(1)[0]  # the first of several
        tokens.append(token)
        votes.append(count)
        voters.append(len(nexts))
        places = [e for e in places if nexts.get(e) == token]
    return Match(longest, tokens, votes, voters) if tokens else None


def joined(texts: Sequence[Sequence[int]]) -> list[int]:
    return [token for text in texts for token in (*text, SEPARATOR)]


def near(found: Match | None, expected: Match | None, text: Sequence[int]) -> bool:
    """Equal, unless a pair of tokens comes more often than a search looks at."""
    common = max(Counter(pairwise(text)).values(), default=0)
    return found == expected or common > CANDIDATES


@given(TEXTS, st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 9))
@settings(max_examples=300)
def test_it_finds_what_a_search_finds(
    texts: list[list[int]], context: list[int], most: int
) -> None:
    text = joined(texts)
    index, asked = SuffixIndex(LEAST_TOKENS), SuffixIndex(LEAST_TOKENS)
    index.extend(text)
    asked.extend(context)
    assert near(index.find(asked, most), searched(text, context, most, own=False), text)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 9))
@settings(max_examples=300)
def test_a_text_goes_on_like_itself_even_beyond_its_end(text: list[int], most: int) -> None:
    index = SuffixIndex(LEAST_TOKENS)
    for token in text:
        index.extend([token])
    assert near(index.find(index, most), searched(text, text, most, own=True), text)


@given(st.integers(1, 9), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_only_the_latest_tokens_are_found_after_growing_and_shrinking(
    times: int, random: object
) -> None:
    draw = random.randrange  # type: ignore[attr-defined]
    text = [draw(5) for _ in range(times * 1000)]
    index, context = SuffixIndex(4 * LEAST_TOKENS), SuffixIndex(LEAST_TOKENS)
    index.extend(text)
    held = text[-4 * LEAST_TOKENS :]
    assert index.end - index.tail == len(held)
    index.set_limit(LEAST_TOKENS)
    assert index.capacity == LEAST_TOKENS
    held = held[-LEAST_TOKENS:]
    start = draw(len(held) - 30)
    context.extend(held[start : start + 20])
    found = index.find(context, 5)
    assert found is not None
    assert near(found, searched(held, held[start : start + 20], 5, own=False), held)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefghi"), st.integers(1, 60_000)), min_size=1, max_size=40
    )
)
@settings(max_examples=30, deadline=None)
def test_the_memory_of_all_topics_is_bounded(additions: list[tuple[str, int]]) -> None:
    store = SuffixStore(10.0, lambda: 0.0)
    for number, (topic, size) in enumerate(additions):
        store.add(topic, "", f"r{number}", range(number, number + size))
        held = list(store._texts.values())
        assert all(own.index.capacity <= own.limit <= TOPIC_TOKENS for own in held)
        assert sum(own.limit for own in held) == store.num_tokens <= ALL_TOKENS
    # The latest answer is there, as far as its topic may hold it.
    context = SuffixIndex(LEAST_TOKENS)
    context.extend(range(number, number + size)[-20:-3])
    index = store.index(topic, "")
    assert index is not None
    assert size < 20 or index.find(context, 3) is not None


def test_topics_that_come_when_the_memory_is_full_get_their_part_of_it() -> None:
    store = SuffixStore(10.0, lambda: 0.0)
    for number in range(16):
        store.add(f"{number % 8}", "", "r", range(TOPIC_TOKENS // 2 + 1))
    assert store.num_tokens == ALL_TOKENS
    for number in range(20):
        store.add("t", f"{number}", "r", [1, 2, 3])
        assert store.num_tokens <= ALL_TOKENS


def test_a_lower_limit_gives_memory_back() -> None:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    before, kept = resident(), []
    for _ in range(32):
        kept.append(SuffixIndex(TOPIC_TOKENS))
        kept[-1].extend(range(TOPIC_TOKENS))
        kept[-1].set_limit(LEAST_TOKENS)
    assert resident() - before < 14 * 32 * TOPIC_TOKENS  # half of what they had


def test_an_index_may_be_read_while_the_process_ends() -> None:
    """As by a thread that does not know of it yet."""
    code = f"""
import atexit
def late():
    index.extend(range(9, 50_000))
    print(index.find(index, 3))
atexit.register(late)  # before all others, so it is called after them
from {SuffixIndex.__module__} import SuffixIndex
index = SuffixIndex(2**17)
index.extend([*range(3000), *range(9)])
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


@pytest.mark.parametrize("freed", ["index", "smaller ring"])
def test_freed_memory_holds_no_tokens(freed: str) -> None:
    """The process's memory is read, since what is freed may be mapped no more."""
    index = SuffixIndex(2048)
    index.extend(range(LEAST_TOKENS))
    tokens = ctypes.c_void_p.from_address(index._index + _TOKENS_AT).value
    assert tokens is not None
    held, sought = bytearray(4 * LEAST_TOKENS), array("i", range(500, 532)).tobytes()
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        os.preadv(memory.fileno(), [held], tokens)
        assert sought in held
        if freed == "index":
            del index
        else:
            index.extend([0])
        with contextlib.suppress(OSError):
            os.preadv(memory.fileno(), [held], tokens)
            assert sought not in held


@given(TEXTS, st.data())
@settings(max_examples=100)
def test_what_is_removed_is_found_no_more(texts: list[list[int]], data: st.DataObject) -> None:
    """The store answers as one that never held the removed answers."""
    gone = data.draw(st.sets(st.integers(0, len(texts) - 1)))
    store, never = SuffixStore(10.0, lambda: 0.0), SuffixStore(10.0, lambda: 0.0)
    for number, text in enumerate(texts):
        store.add("sql", "", f"r{number}", text)
        if number not in gone:
            never.add("sql", "", f"r{number}", text)
    assert sum(store.remove(f"r{number}", None) for number in gone) == len(gone)
    context = SuffixIndex(LEAST_TOKENS)
    context.extend(data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=12)))
    index, other = store.index("sql", ""), never.index("sql", "")
    assert (index is None) == (other is None) == (len(gone) == len(texts))
    if index is not None and other is not None:
        assert index.find(context, 9) == other.find(context, 9)
