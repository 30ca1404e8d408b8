"""The ingress over real target replicas that are cut off: each request gets its one answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError
from tiny_models import save_tiny

from paceline.actors.engine.engine_loop import EngineLoop
from paceline.actors.engine.request import GenerationChunk, GenerationRequest, SamplingParams
from paceline.actors.engine.sequence import Sequence
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.target import TargetReplica
from paceline.deploy.api.failover import Failover, FailoverPolicy
from paceline.deploy.api.generation import complete_all, stream_all
from paceline.deploy.errors import ApiError

POLICY = FailoverPolicy(stall_timeout_s=1.0, failover_timeout_s=6.0)
GONE = ActorUnavailableError("gone", b"\0" * 16)
HANG = TimeoutError("stands for a process that gives nothing more")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TargetReplica]]:
    root = tmp_path_factory.mktemp("models")
    target, draft = save_tiny(root / "target", 1), save_tiny(root / "draft", 2, layers=1)
    settings = TargetSettings(
        str(target), {"general": str(draft)}, dtype="float32", num_threads=1, stall_timeout_s=1.0
    )
    made = [TargetReplica(settings) for _ in range(2)]
    yield made
    for replica in made:
        replica._loop.close()


class Response:
    """Serve's response: the replica's stream until the fault, if there is one."""

    def __init__(
        self, chunks: AsyncIterator[GenerationChunk], cut: int, fault: BaseException
    ) -> None:
        self._chunks, self.left, self._fault = chunks, cut, fault

    def __aiter__(self) -> Response:
        return self

    async def __anext__(self) -> GenerationChunk:
        if self.left == 0:
            await self._chunks.aclose()  # type: ignore[attr-defined]
            if self._fault is HANG:
                await asyncio.sleep(3600)
            raise self._fault
        self.left -= 1
        return await anext(self._chunks)

    def cancel(self) -> None:
        pass


class Streams:
    """Serve's handle: replicas in turn; ``faults`` says after how many chunks each call ends."""

    def __init__(
        self, replicas: list[TargetReplica], faults: list[tuple[int, BaseException]]
    ) -> None:
        self._replicas, self._faults = replicas, list(faults)
        self.requests: list[GenerationRequest] = []
        self.responses: list[Response] = []
        self.generate = self

    def remote(self, request: GenerationRequest, whole: bool) -> Response:
        replica = self._replicas[len(self.requests) % 2]
        self.requests.append(request)
        cut, fault = self._faults.pop(0) if self._faults else (-1, GONE)
        self.responses.append(Response(replica.generate(request, whole), cut, fault))
        return self.responses[-1]


def asked(name: str, **more: Any) -> GenerationRequest:
    sampling = SamplingParams(**({"max_tokens": 30, "temperature": 0.0, "ignore_eos": True} | more))
    return GenerationRequest(name, (5, 6, 7), sampling, num_speculative_tokens=2)


async def streamed(streams: Any, request: GenerationRequest) -> list[GenerationChunk]:
    return [chunk async for _, chunk in stream_all(streams, [request], Failover(POLICY))]


def tokens(chunks: list[GenerationChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.9, "seed": 3}])
@pytest.mark.parametrize("faults", [[(0, GONE)], [(3, GONE), (2, HANG), (1, GONE)]])
def test_a_stream_goes_on_over_deaths_and_hangs(
    replicas: list[TargetReplica], fields: dict[str, Any], faults: list[tuple[int, Exception]]
) -> None:
    whole = asyncio.run(streamed(Streams(replicas, []), asked("a", **fields)))
    streams = Streams(replicas, faults)
    chunks = asyncio.run(streamed(streams, asked("b", **fields)))
    assert tokens(chunks) == tokens(whole)
    assert "".join(c.text for c in chunks) == "".join(c.text for c in whole)
    assert chunks[-1].finish_reason == "length"
    assert [r.attempt for r in streams.requests] == list(range(len(faults) + 1))
    assert len(streams.requests[-1].output_token_ids) >= sum(cut for cut, _ in faults)
    undisturbed, merged = whole[-1].speculative, chunks[-1].speculative
    assert undisturbed is not None
    assert merged is not None
    assert merged.num_spec_steps >= sum(cut for cut, _ in faults)
    assert merged.num_draft_tokens >= merged.num_accepted_draft_tokens


def test_whole_answers_and_several_choices_too(replicas: list[TargetReplica]) -> None:
    requests = [asked("a"), asked("b", temperature=0.8, seed=9)]
    expected = asyncio.run(complete_all(Streams(replicas, []), requests, Failover(POLICY)))
    faults = [(0, GONE), (0, HANG), (0, GONE)]
    found = asyncio.run(complete_all(Streams(replicas, faults), requests, Failover(POLICY)))
    assert [replace(c, speculative=None) for c in found] == [
        replace(c, speculative=None, num_cached_tokens=found[i].num_cached_tokens)
        for i, c in enumerate(expected)
    ]

    async def both() -> list[list[int]]:
        parts: list[list[int]] = [[], []]
        async for index, chunk in stream_all(Streams(replicas, faults), requests, Failover(POLICY)):
            parts[index].extend(chunk.token_ids)
        return parts

    assert asyncio.run(both()) == [list(c.token_ids) for c in expected]


def test_a_whole_answer_loses_nothing_to_a_fault_of_the_engine(
    replicas: list[TargetReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is taken from a chunk with a failure: others come before it."""
    [expected] = asyncio.run(complete_all(Streams(replicas, []), [asked("a")], Failover(POLICY)))
    taken, accept = itertools.count(), Sequence.append_round

    def failing(self: Sequence, *args: Any) -> None:
        accept(self, *args)
        if next(taken) == 4:
            raise RuntimeError

    streams = Streams(replicas, [])
    with monkeypatch.context() as patched:
        patched.setattr(Sequence, "append_round", failing)
        [found] = asyncio.run(complete_all(streams, [asked("b")], Failover(POLICY)))
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    _, again = streams.requests
    assert len(again.output_token_ids) >= 4


@pytest.mark.parametrize("whole", [False, True])
def test_tokens_keep_their_sources_over_deaths(replicas: list[TargetReplica], whole: bool) -> None:
    request = replace(asked("a"), token_sources=True)
    streams = Streams(replicas, [(3, GONE), (2, HANG)])
    if whole:
        chunks = asyncio.run(complete_all(streams, [request], Failover(POLICY)))
    else:
        chunks = asyncio.run(streamed(streams, request))
    for chunk in chunks:
        assert chunk.token_sources is not None
        assert len(chunk.token_sources) == len(chunk.token_ids)
    found = [item for chunk in chunks for item in chunk.token_sources or ()]
    assert len(found) == 30
    alone = asyncio.run(streamed(Streams(replicas, []), request))
    offsets = [item.text_offset for chunk in alone for item in chunk.token_sources or ()]
    assert [item.text_offset for item in found] == offsets


def test_what_the_request_itself_causes_is_not_tried_again(replicas: list[TargetReplica]) -> None:
    """A replica's own exception is tried once more, back-pressure and our own faults never."""
    for fault, tries, status in [
        (RayTaskError("generate", "trace", ValueError("bad")), 2, 500),
        (BackPressureError(1, 1), 1, 503),
        (ValueError("raised by the replica, and not wrapped"), 2, 500),
    ]:
        streams = Streams(replicas, [(0, fault)] * 9)
        with pytest.raises(ApiError) as caught:
            asyncio.run(complete_all(streams, [asked("x")], Failover(POLICY)))
        assert (len(streams.requests), caught.value.status) == (tries, status)


def test_one_raw_exception_of_a_replica_fails_no_request(replicas: list[TargetReplica]) -> None:
    streams = Streams(replicas, [(2, ValueError("bad"))])
    assert len(tokens(asyncio.run(streamed(streams, asked("v"))))) == 30
    assert len(streams.requests) == 2


def test_what_fails_on_our_own_side_is_not_tried_again() -> None:
    calls = []

    class Handle:
        generate = SimpleNamespace(remote=lambda *_: calls.append(1) or 1 / 0)

    with pytest.raises(ApiError) as caught:
        asyncio.run(complete_all(Handle(), [asked("x")], Failover(POLICY)))
    assert (len(calls), caught.value.status) == (1, 500)


@pytest.mark.parametrize("count", [1, 2])
def test_a_stream_that_a_replica_cancels_goes_on_elsewhere(
    replicas: list[TargetReplica], count: int
) -> None:
    requests = [asked(f"c{i}") for i in range(count)]
    streams = Streams(replicas, [(1, asyncio.CancelledError())])

    async def every() -> list[list[int]]:
        parts: list[list[int]] = [[] for _ in requests]
        async with asyncio.timeout(20):
            async for index, chunk in stream_all(streams, requests, Failover(POLICY)):
                parts[index].extend(chunk.token_ids)
        return parts

    assert [len(part) for part in asyncio.run(every())] == [30] * count
    assert len(streams.requests) == count + 1


def test_our_own_cancellation_is_none_of_the_replica_s(replicas: list[TargetReplica]) -> None:
    streams = Streams(replicas, [(0, HANG)])
    failover = Failover(POLICY)

    async def cancelled() -> None:
        task = asyncio.create_task(complete_all(streams, [asked("x")], failover))
        while not streams.requests:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert failover.gone == 0


def test_a_fault_of_the_engine_costs_those_that_ran_there_nothing(
    replicas: list[TargetReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, which two faults of requests alone would not forgive."""
    engine = replicas[0]._loop._engine
    emit, rounds = engine._emit, itertools.count()

    def failing(*args: Any) -> Any:
        if next(rounds) in (2, 6):
            raise RuntimeError("the device is gone")
        return emit(*args)

    monkeypatch.setattr(engine, "_emit", failing)
    failover = Failover(POLICY)
    requests = [asked("a"), asked("b")]

    class Same(Streams):
        def remote(self, request: GenerationRequest, whole: bool) -> Response:
            self._replicas = [replicas[0]] * 2
            return super().remote(request, whole)

    streams = Same(replicas, [])
    found = asyncio.run(complete_all(streams, requests, failover))
    assert [len(c.token_ids) for c in found] == [30, 30]
    assert failover.counts()["faults"] >= 2
    assert (failover.broken, failover.given_up) == (0, 0)
    assert streams.requests[-1].failed_on == (replicas[0]._replica_id,)


def test_a_replica_with_a_stopped_engine_sends_no_heartbeats_and_refuses(
    replicas: list[TargetReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas[0]._loop._engine._scheduler, "schedule", lambda: None)
    healthy = iter([True])  # as it is submitted, and then no more
    monkeypatch.setattr(EngineLoop, "healthy", property(lambda _: next(healthy, False)))

    async def first() -> GenerationChunk:
        async with asyncio.timeout(1.0):
            return await anext(replicas[0].generate(asked("s")))

    with pytest.raises(TimeoutError):
        asyncio.run(first())
    chunk = asyncio.run(first())
    assert (chunk.finish_reason, chunk.replica_id) == ("refused", replicas[0]._replica_id)


def test_no_replica_at_all_is_a_503_in_the_end(replicas: list[TargetReplica]) -> None:
    streams = Streams(replicas, [(0, GONE)] * 99)
    policy = replace(POLICY, failover_timeout_s=0.5)
    with pytest.raises(ApiError) as caught:
        asyncio.run(complete_all(streams, [asked("x")], Failover(policy)))
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)


def test_a_request_that_waits_in_the_queue_is_not_taken_for_lost(
    replicas: list[TargetReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine admits no request for longer than the stall time-out: signs of life come."""
    replica = replicas[0]
    held = {"yes": True}
    schedule = replica._loop._engine._scheduler.schedule

    def later() -> None:
        if not held["yes"]:
            schedule()

    monkeypatch.setattr(replica._loop._engine._scheduler, "schedule", later)
    beats = []

    async def wait() -> list[GenerationChunk]:
        streams = Streams([replica, replica], [])
        answer = asyncio.create_task(streamed(streams, asked("q")))
        chunks = replica.generate(asked("watch"))
        for _ in range(3 * 4):  # as many signs of life as three time-outs have
            beats.append(await anext(chunks))
        held["yes"] = False
        await chunks.aclose()
        found = await answer
        assert len(streams.requests) == 1
        return found

    assert len(tokens(asyncio.run(wait()))) == 30
    assert all(beat.finish_reason is None and not beat.token_ids for beat in beats)


def test_an_engine_that_hangs_gives_no_sign_of_life(
    replicas: list[TargetReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas[0]._loop, "round_age_s", lambda: 99.0)
    monkeypatch.setattr(replicas[0]._loop._engine._scheduler, "schedule", lambda: None)
    streams = Streams(replicas, [])
    assert len(tokens(asyncio.run(streamed(streams, asked("h"))))) == 30
    assert len(streams.requests) == 2
    with pytest.raises(RuntimeError, match="a round of the engine hangs"):
        replicas[0].check_health()
