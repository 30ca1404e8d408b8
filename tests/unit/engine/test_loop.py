"""The engine's thread: faults end the requests that they affect, and no client hangs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import make_engine, request

from paceline.actors.engine.engine_loop import EngineLoop
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.request import GenerationChunk, GenerationRequest
from paceline.actors.engine.sequence import Sequence

WAIT_S = 20.0


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    loop = EngineLoop(make_engine(), num_threads=1)
    yield loop
    loop.close()
    assert not loop.healthy


def send(loop: EngineLoop, wanted: GenerationRequest) -> queue.Queue[GenerationChunk]:
    chunks: queue.Queue[GenerationChunk] = queue.Queue()
    loop.submit(wanted, chunks.put)
    return chunks


def reason(chunks: queue.Queue[GenerationChunk]) -> str:
    while True:
        chunk = chunks.get(timeout=WAIT_S)
        if chunk.finish_reason is not None:
            return chunk.finish_reason


def test_requests_of_many_threads_come_to_their_ends(loop: EngineLoop) -> None:
    answers = [send(loop, request(f"r{i}", [5 + i, 7], ignore_eos=True)) for i in range(9)]
    assert [reason(a) for a in answers] == ["length"] * 9
    assert loop.load() == (0, 0)


def test_a_request_that_cannot_run_is_refused_alone(loop: EngineLoop) -> None:
    good, bad = send(loop, request("good", [5], ignore_eos=True)), send(loop, request("bad", []))
    assert (reason(good), reason(bad)) == ("length", "error")


def test_huge_numbers_fail_no_request(loop: EngineLoop) -> None:
    huge = request("h", [5], temperature=1.0, top_k=2**80, seed=2**70, ignore_eos=True)
    answers = [send(loop, request("r", [5], ignore_eos=True)), send(loop, huge)]
    assert [reason(a) for a in answers] == ["length"] * 2


def test_what_fails_for_one_request_ends_that_one(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = Sequence.append_round

    def failing(self: Sequence, *args: Any) -> None:
        if self.request_id == "bad":
            raise RuntimeError("no text can be made of this")
        accept(self, *args)

    monkeypatch.setattr(Sequence, "append_round", failing)
    answers = [send(loop, request(name, [5], ignore_eos=True)) for name in ("good", "bad", "fine")]
    assert [reason(a) for a in answers] == ["length", "error", "length"]
    assert loop.healthy


def test_a_fault_of_the_target_ends_every_request_and_the_next_ones_are_served(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = Sequence.next_chunk
    faults = iter([True])

    def failing(self: Sequence) -> GenerationChunk:
        if self.request_id == "last" and next(faults, False):
            raise RuntimeError("in the middle of handing out")
        return chunk(self)

    monkeypatch.setattr(Sequence, "next_chunk", failing)
    # The first ends in the very round that fails: it has left the engine by then.
    both = threading.Event()
    loop._commands.put(lambda: both.wait() and None)  # type: ignore[attr-defined]
    names = ("first", "last")
    answers = [send(loop, request(name, [5], max_tokens=1)) for name in names]
    both.set()
    assert [reason(a) for a in answers] == ["fault", "fault"]
    assert reason(send(loop, request("next", [5], max_tokens=2, ignore_eos=True))) == "length"
    assert loop.healthy


@pytest.mark.parametrize("token", [-1, 300])
@pytest.mark.parametrize("place", ["prompt", "output"])
def test_a_token_that_the_target_does_not_have_fails_its_own_request(
    loop: EngineLoop, token: int, place: str
) -> None:
    bad = request("bad", [5, token] if place == "prompt" else [5])
    bad = replace(bad, output_token_ids=(token,) if place == "output" else ())
    answers = [send(loop, request("good", [5], ignore_eos=True)), send(loop, bad)]
    assert [reason(a) for a in answers] == ["length", "error"]


def test_a_target_that_keeps_failing_refuses_new_requests(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(loop._engine, "_decode", failing)
    for i in range(5):
        assert loop.healthy
        assert reason(send(loop, request(f"r{i}", [5]))) == "fault"
    assert not loop.healthy
    assert reason(send(loop, request("next", [5]))) == "refused"
    monkeypatch.undo()


def test_those_that_wait_have_no_part_in_a_fault(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows: the fifth has not begun when the round fails."""

    def failing(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(loop._engine, "_decode", failing)
    all_there = threading.Event()
    loop._commands.put(lambda: all_there.wait() and None)  # type: ignore[attr-defined]
    answers = [send(loop, request(f"r{i}", [5])) for i in range(5)]
    all_there.set()
    assert [reason(a) for a in answers] == ["fault"] * 4 + ["refused"]


def test_a_prefix_that_cannot_be_cached_costs_no_request(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(KVCache, "cache_prefix", failing)
    left = send(loop, request("left", [5], ignore_eos=True, max_tokens=80))
    left.get(timeout=WAIT_S)
    loop.abort("left")
    assert reason(send(loop, request("next", [5], ignore_eos=True))) == "length"
    assert loop.healthy
    assert loop.load() == (0, 0)


def test_a_failing_client_ends_its_own_request_alone(loop: EngineLoop) -> None:
    given = threading.Event()

    def closed(_: GenerationChunk) -> None:
        given.set()
        raise RuntimeError("Event loop is closed")

    loop.submit(request("gone", [5], max_tokens=60, ignore_eos=True), closed)
    assert given.wait(WAIT_S)
    assert reason(send(loop, request("here", [5], max_tokens=4))) in ("length", "stop")
    assert loop.healthy
    assert loop.load() == (0, 0)
