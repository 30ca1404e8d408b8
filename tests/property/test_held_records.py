"""Held records, by invariants under random traffic, purges and pauses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from replay_samples import make_record

from paceline.actors.replay.held_records import HeldRecords
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.replay.selection import LeftOut

TOPICS = ("sql", "math", "general")
PAIR = TOPICS[:2]


@dataclass(frozen=True)
class Add:
    topic: str
    length: int


@dataclass(frozen=True)
class HandOver:
    pass


@dataclass(frozen=True)
class Purge:
    answer: int | None
    topic: str | None


@dataclass(frozen=True)
class Expire:
    age: int


STEPS = st.lists(
    st.one_of(
        st.builds(Add, st.sampled_from(TOPICS), st.integers(1, 12)),
        st.builds(HandOver),
        st.builds(
            Purge,
            st.none() | st.integers(0, 20),
            st.none() | st.sampled_from(TOPICS),
        ),
        st.builds(Expire, st.integers(0, 10)),
    ),
    max_size=60,
)


@given(steps=STEPS, limit=st.integers(0, 3000))
def test_records_leave_once_in_order_within_the_bound(steps: list[object], limit: int) -> None:
    left_out = LeftOut()
    held = HeldRecords(left_out, limit)
    model: list[ReplayRecord] = []  # what must be held, of records that were not dropped
    sent: list[ReplayRecord] = []
    added = dropped = 0
    for now, step in enumerate(steps):
        if isinstance(step, Add):
            record = make_record(
                request_id=f"cmpl-{added}-0", topic=step.topic, length=step.length, created=now
            )
            added += 1
            held.add(record, now)
            model.append(record)
            dropped += drop(model, limit)
        elif isinstance(step, HandOver):
            before = len(sent)
            held.hand_over(sent.append, now)
            assert sent[before:] == model[:1]
            del model[:1]
        else:
            if isinstance(step, Purge):
                answer = None if step.answer is None else f"cmpl-{step.answer}"
                gone = [r for r in model if purged(r, answer, step.topic)]
                assert held.remove(answer, step.topic) == len(gone)
                assert held.remove(answer, step.topic) == 0
            else:
                assert isinstance(step, Expire)
                gone = [r for r in model if r.created < now - step.age]
                assert held.expire(now - step.age) == len(gone)
            model = [r for r in model if not any(r is other for other in gone)]
        assert len(held) == len(model)
        assert held.num_bytes == sum(r.num_bytes for r in model) <= limit
    assert sum(map(left_out.take, TOPICS)) == dropped
    numbers = [int(record.request_id.split("-")[1]) for record in sent]
    assert numbers == sorted(set(numbers))


@given(st.lists(st.sampled_from(PAIR), max_size=60), st.integers(1, 12), st.sampled_from(PAIR))
def test_a_full_hold_has_room_for_topics_that_others_crowd_out(
    topics: list[str], places: int, asked: str
) -> None:
    size = make_record(request_id="cmpl-0-0").num_bytes
    held, counts = HeldRecords(LeftOut(), 2 * places * size), Counter[str]()
    for number, topic in enumerate(topics):  # one after another, so none is under way
        room = held.has_room(topic)
        assert room == (counts.total() < places or counts[topic] < max(counts.values()))
        if room:
            held.add(make_record(request_id=f"cmpl-{number}-0", topic=topic), 0.0)
            counts[topic] += 1
    assert len(held) == counts.total() <= len(topics)
    assert held.has_room(asked) or counts[asked] >= places / len(PAIR)


def purged(record: ReplayRecord, answer: str | None, topic: str | None) -> bool:
    return topic in (None, record.topic) and answer in (None, record.request_id[:-2])


def drop(model: list[ReplayRecord], limit: int) -> int:
    """Drop the oldest of the topics that hold most until all fit; returns how many."""
    count = 0
    while sum(r.num_bytes for r in model) > limit:
        sizes = {t: sum(r.num_bytes for r in model if r.topic == t) for t in TOPICS}
        oldest = next(r for r in model if sizes[r.topic] == max(sizes.values()))
        model[:] = [r for r in model if r is not oldest]
        count += 1
    return count


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.booleans()), min_size=1, max_size=50))
def test_a_busy_engine_hands_over_once_a_second_at_most_and_never_starves(
    rounds: list[tuple[float, bool]],
) -> None:
    """Rounds take so many seconds each, and end with requests or without."""
    held, now, busy_at, last = HeldRecords(LeftOut(), 2**30), 0.0, -1.0, 0.0
    for number in range(len(rounds) + 1):
        held.add(make_record(request_id=f"cmpl-{number}-0"), now)
    for seconds, busy in rounds:
        now += seconds
        due = held.due_in_s(now, busy=busy)
        assert 0.0 <= due <= 1.0 + 1e-9  # sums of seconds are rounded
        busy_at = now if busy else busy_at
        if due > 0.0:
            continue
        assert now - last >= 1.0 - 1e-9 if busy else now - busy_at >= 0.05 - 1e-9
        before = len(held)
        held.hand_over(lambda _: None, now)
        assert len(held) == before - 1
        last = now
