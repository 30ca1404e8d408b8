"""Merging of stream chunks, and what is sent at once."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any

import pytest
from engines import make_engine, request
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.engine_loop import EngineLoop, StreamBatcher
from paceline.actors.engine.request import (
    FINISH_ERROR,
    FINISH_FAULT,
    FINISH_LENGTH,
    GenerationChunk,
)
from paceline.actors.engine.sequence import Sequence
from paceline.deploy.config.config import load_config
from paceline.deploy.config.replica_settings import target_settings


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Client:
    chunks: list[GenerationChunk] = field(default_factory=list)

    def __call__(self, chunk: GenerationChunk) -> None:
        self.chunks.append(chunk)

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [chunk.token_ids for chunk in self.chunks]


def chunk(*tokens: int, reason: str | None = None) -> GenerationChunk:
    text = "".join(f"<{token}>" for token in tokens)
    return GenerationChunk(text, tokens, reason, rounds=((2, len(tokens) - 1),))


def make_batcher(rate: float = 100.0) -> tuple[StreamBatcher, Clock, list[str]]:
    clock, lost = Clock(), list[str]()
    return StreamBatcher(rate, clock, lost.append), clock, lost


def test_the_first_chunk_is_sent_at_once_and_the_next_are_merged() -> None:
    batcher, clock, _ = make_batcher()
    client = Client()
    batcher.open("a", client)
    for token in (1, 2, 3):
        batcher.put("a", chunk(token))
    assert client.tokens == [(1,)]
    clock.now = 0.011
    batcher.flush()
    assert client.tokens == [(1,), (2, 3)]
    assert client.chunks[-1].text == "<2><3>"
    assert client.chunks[-1].rounds == ((2, 0), (2, 0))


def test_the_last_chunk_includes_pending_ones() -> None:
    batcher, _, _ = make_batcher()
    client = Client()
    batcher.open("a", client)
    for each in (chunk(1), chunk(2), chunk(3, reason=FINISH_LENGTH)):
        batcher.put("a", each)
    assert client.tokens == [(1,), (2, 3)]
    assert client.chunks[-1].finish_reason == FINISH_LENGTH
    assert not len(batcher)


@pytest.mark.parametrize("reason", [FINISH_FAULT, FINISH_ERROR])
def test_a_failure_is_a_chunk_of_its_own(reason: str) -> None:
    """The ingress takes no token from a chunk with a failure."""
    batcher, _, _ = make_batcher()
    client = Client()
    batcher.open("a", client)
    for each in (chunk(1), chunk(2), GenerationChunk("", (), reason)):
        batcher.put("a", each)
    assert client.tokens == [(1,), (2,), ()]
    assert [c.finish_reason for c in client.chunks] == [None, None, reason]


def test_without_a_limit_every_chunk_is_sent_at_once() -> None:
    batcher, _, _ = make_batcher(0.0)
    client, whole = Client(), Client()
    batcher.open("a", client)
    batcher.open("b", whole, whole=True)
    for name in "ab":
        for token in (1, 2):
            batcher.put(name, chunk(token))
    assert client.tokens == whole.tokens == [(1,), (2,)]


def test_a_whole_answer_is_merged() -> None:
    batcher, clock, _ = make_batcher()
    client = Client()
    batcher.open("a", client, whole=True)
    for token in range(50):
        clock.now += 0.01
        batcher.put("a", chunk(token))
        batcher.flush()
    batcher.put("a", chunk(50, reason=FINISH_LENGTH))
    assert client.tokens == [(0,), tuple(range(1, 51))]


def test_a_failing_client_closes_its_stream_alone() -> None:
    batcher, clock, lost = make_batcher()
    client = Client()

    def gone(_: GenerationChunk) -> None:
        raise ConnectionError

    batcher.open("gone", gone)
    batcher.open("a", client)
    batcher.put("gone", chunk(1))
    batcher.put("gone", chunk(2))
    batcher.put("a", chunk(1))
    clock.now = 1.0
    batcher.flush()
    assert (lost, batcher.names, client.tokens) == (["gone"], ["a"], [(1,)])


def test_a_closed_stream_gets_nothing_more() -> None:
    batcher, clock, _ = make_batcher()
    client = Client()
    batcher.open("a", client)
    batcher.put("a", chunk(1))
    batcher.put("a", chunk(2))
    batcher.close("a")
    batcher.close("a")
    batcher.put("a", chunk(3))
    clock.now = 1.0
    batcher.flush()
    assert client.tokens == [(1,)]


@pytest.mark.parametrize(("round_s", "every"), [(0.045, 1), (0.021, 2), (0.1, 1), (0.0041, 12)])
def test_a_chunk_is_sent_at_the_nearest_end_of_a_round(round_s: float, every: int) -> None:
    batcher, clock, _ = make_batcher(20.0)
    client = Client()
    batcher.open("a", client)
    for token in range(1 + 3 * every):
        clock.now += round_s
        batcher.put("a", chunk(token))
        batcher.flush()
    assert [len(tokens) for tokens in client.tokens] == [1, every, every, every]


def test_the_chunks_of_all_streams_are_sent_together() -> None:
    batcher, clock, _ = make_batcher(20.0)
    clients = [Client() for _ in range(3)]
    for at, client in enumerate(clients):  # they begin at different times
        clock.now += 0.02
        batcher.open(str(at), client)
        batcher.put(str(at), chunk(0))
    sent: list[int] = []
    for token in range(1, 41):
        clock.now += 0.01
        for at in range(3):
            batcher.put(str(at), chunk(token))
        before = sum(len(client.chunks) for client in clients)
        batcher.flush()
        sent.append(sum(len(client.chunks) for client in clients) - before)
    assert set(sent) == {0, 3}
    assert sent.count(3) == 8  # twenty a second


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 0.1)), max_size=60))
def test_nothing_is_lost_or_reordered(rounds: list[tuple[int, float]]) -> None:
    batcher, clock, _ = make_batcher()
    clients = [Client() for _ in range(4)]
    for i, client in enumerate(clients):
        batcher.open(str(i), client, whole=i == 3)
    said: list[list[int]] = [[], [], [], []]
    for token, (who, pause) in enumerate(rounds):
        clock.now += pause
        batcher.put(str(who), chunk(token))
        said[who].append(token)
        batcher.flush()
    for i in range(4):
        batcher.put(str(i), chunk(1000, reason=FINISH_LENGTH))
        assert [t for part in clients[i].tokens for t in part] == [*said[i], 1000]


def test_batching_does_not_change_the_engines_streams() -> None:
    answers = []
    for rate in (0.0, 30.0):
        loop = EngineLoop(make_engine(), num_threads=1, chunks_per_s=rate)
        try:
            queues: list[queue.Queue[GenerationChunk]] = []
            for i in range(5):
                got: queue.Queue[GenerationChunk] = queue.Queue()
                loop.submit(request(f"r{i}", [5 + i, 7], ignore_eos=True), got.put)
                queues.append(got)
            answers.append([_read(got) for got in queues])
        finally:
            loop.close()
    (at_once, together) = answers
    assert [tokens for tokens, _ in at_once] == [tokens for tokens, _ in together]
    assert sum(count for _, count in together) < sum(count for _, count in at_once)


def test_a_fault_ends_streams_that_hold_tokens_after_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = EngineLoop(make_engine(), num_threads=1, chunks_per_s=0.001)
    rounds, accept = iter(range(100)), Sequence.append_round

    def failing(self: Sequence, *args: Any) -> None:
        accept(self, *args)
        if next(rounds) == 3:
            raise RuntimeError

    try:
        with monkeypatch.context() as patched:
            patched.setattr(Sequence, "append_round", failing)
            got: queue.Queue[GenerationChunk] = queue.Queue()
            loop.submit(request("r", [5, 7], ignore_eos=True), got.put)
            parts = [got.get(timeout=20.0)]
            while parts[-1].finish_reason is None:
                parts.append(got.get(timeout=20.0))
        assert [part.finish_reason for part in parts] == [None, None, FINISH_ERROR]
        assert len(parts[1].token_ids) >= 2  # of the rounds between the first and the last
    finally:
        loop.close()


def test_the_limit_is_the_config_s() -> None:
    config = load_config(None, {"target.stream_chunks_per_s": 40.0})
    assert target_settings(config).stream_chunks_per_s == 40.0
    assert target_settings(load_config(None, {})).stream_chunks_per_s == 12.0


def _read(got: queue.Queue[GenerationChunk]) -> tuple[tuple[int, ...], int]:
    tokens: tuple[int, ...] = ()
    count = 0
    while True:
        part = got.get(timeout=20.0)
        tokens, count = tokens + part.token_ids, count + 1
        if part.finish_reason is not None:
            return tokens, count
