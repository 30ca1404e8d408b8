"""Synthetic records, made by the idle target from a thread of the first trainer's process."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Protocol

from paceline.actors.backoff import Backoff
from paceline.actors.engine.request import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    FINISH_YIELDED,
    GenerationChunk,
    GenerationRequest,
    merge_chunks,
)
from paceline.actors.engine.target_handle import StreamingTarget, TargetHandle
from paceline.actors.replay.buffer import ShardStats
from paceline.actors.training.background import BackgroundLoop
from paceline.actors.training.progress import SyntheticStatus
from paceline.actors.training.synthetic.answers import SyntheticSettings, further_answer

if TYPE_CHECKING:
    from paceline.actors.replay.shard import ShardHandle
    from paceline.actors.training.client import TrainerClient
    from paceline.actors.training.permits import PermitHandle
    from paceline.actors.weights.subscriber import RegistryHandle

_COMPLETE = (FINISH_STOP, FINISH_LENGTH)
_FIRST_REST, _LONGEST_REST = 2, 256  # calls of run_once
_FULL = 0.95  # of the shard's capacity for synthetic records
_PERMIT_POLL_S = 0.1
_LONGEST_S = 120.0


class TargetClient(Protocol):
    """The target; it sends the records of its answers to the shards itself."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Answer each request; return their finish reasons, in this order."""


class SyntheticAnswerGenerator:
    """Makes a few answers at a time; call :meth:`run_once` for ever.

    A topic rests, longer each time, if the target yields or fails, or none of its answers was kept:
    the others have their turn, and nobody is asked in vain for ever.

    Attributes:
        counts: ``made``, answers; ``yielded``, requests that gave way to traffic.
    """

    def __init__(
        self, settings: SyntheticSettings, *, mark: Callable[[], str] = lambda: uuid.uuid4().hex
    ) -> None:
        self._settings = settings
        self._mark = mark  # unique on every call
        self._backoffs: dict[str, Backoff] = {}  # in calls of run_once, by topic
        self._rests: dict[str, int] = {}  # calls left
        self._kept: dict[str, int] = {}  # synthetic records before the last call, by topic
        self.counts: Counter[str] = Counter(made=0, yielded=0)

    def lacks(self, client: TrainerClient) -> bool:
        """Whether any topic lacks synthetic records."""
        return lacking(client.stats(), self._settings)[0] is not None

    def run_once(self, client: TrainerClient, target: TargetClient) -> bool:
        """Make answers for the topic that lacks most; False if none was made.

        Raises:
            Exception: of the target; the topic rests.
        """
        self._rests = {topic: left - 1 for topic, left in self._rests.items() if left > 1}
        stats = client.stats()
        topic, lacks = lacking(stats, self._settings, self._rests)
        if topic is None or not client.acquire_permit():
            return False
        made, kept = 0, stats[topic].records("synthetic")
        try:
            sources = client.sample(topic, min(lacks, self._settings.at_once), "train")
            reasons = target.generate([further_answer(source, self._mark()) for source in sources])
            made = sum(reason in _COMPLETE for reason in reasons)
            self.counts.update(made=made, yielded=reasons.count(FINISH_YIELDED))
        finally:
            backoff = self._backoffs.setdefault(topic, Backoff(_FIRST_REST, _LONGEST_REST))
            if made and kept > self._kept.get(topic, -1):  # those before have been kept too
                backoff.reset()
            else:
                self._rests[topic] = int(backoff.fail())
            self._kept[topic] = kept
        return made > 0


def lacking(
    stats: Mapping[str, ShardStats],
    settings: SyntheticSettings,
    resting: Container[str] = (),
) -> tuple[str | None, int]:
    """The topic that lacks most synthetic records, and how many; None if no topic lacks any.

    Args:
        stats: topic to its shard's statistics. A shard with no room for synthetic records lacks
            none, whatever their number.
        settings: see SyntheticSettings.
        resting: topics to leave out.
    """
    missing = {
        topic: _wanted(shard.records("train"), settings) - shard.records("synthetic")
        for topic, shard in stats.items()
        if topic not in resting
        and shard.records("train") >= settings.least_records
        and not _is_full(shard)
    }
    topic = max(missing, key=lambda name: missing[name], default=None)
    if topic is None or missing[topic] <= 0:
        return None, 0
    return topic, missing[topic]


def _wanted(train: int, settings: SyntheticSettings) -> int:
    return int(min(settings.per_record * train, settings.most_records - train))


def _is_full(shard: ShardStats) -> bool:
    """Whether a synthetic record may not fit, as long as a training record on average."""
    train, own = shard.splits["train"], shard.splits["synthetic"]
    free = own.capacity_bytes - own.bytes
    return own.bytes >= _FULL * own.capacity_bytes or free * train.records < train.bytes


class ServeTargetClient:
    """The target's deployment.

    Serve's handles may want to live in a running event loop: they have one of their own here.
    """

    def __init__(
        self, find_handle: Callable[[], TargetHandle], permitted: Callable[[], bool]
    ) -> None:
        """Start the event loop.

        Args:
            find_handle: returns the deployment's handle; raises before it is deployed.
            permitted: whether serving is idle; polled while requests are in flight.
        """
        self._find_handle, self._permitted = find_handle, permitted
        self._handle: StreamingTarget | None = None
        self._events = asyncio.new_event_loop()
        name = "paceline-synthetic-requests"
        threading.Thread(target=self._events.run_forever, name=name, daemon=True).start()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """Send all at once, and cancel all when the permit is withdrawn, on whichever replica.

        Raises:
            TimeoutError: it takes longer than any answer should.
            Exception: any error of Ray's or of the replica's.
        """
        answers = asyncio.run_coroutine_threadsafe(self._all(requests), self._events)
        deadline = time.monotonic() + _LONGEST_S
        while time.monotonic() < deadline:
            done, _ = futures.wait([answers], _PERMIT_POLL_S)
            if done:
                return answers.result()
            if not self._permitted():
                answers.cancel()
                return [FINISH_YIELDED] * len(requests)
        answers.cancel()
        raise TimeoutError("the target does not answer")

    async def _all(self, requests: Sequence[GenerationRequest]) -> list[str]:
        if self._handle is None:
            self._handle = self._find_handle().options(stream=True)
        handle = self._handle
        async with asyncio.TaskGroup() as group:  # one that fails cancels the others
            tasks = [group.create_task(_complete(handle, request)) for request in requests]
        return [task.result() for task in tasks]


async def _complete(handle: StreamingTarget, request: GenerationRequest) -> str:
    response = handle.generate.remote(request, True)
    try:
        chunks: list[GenerationChunk] = [chunk async for chunk in response]
    finally:
        response.cancel()  # does nothing to a response that has ended
    return (chunks and merge_chunks(chunks).finish_reason) or FINISH_ERROR


class SyntheticAnswers:
    """Runs a generator in a thread of its own, from construction to the process' end."""

    def __init__(
        self,
        settings: SyntheticSettings,
        shards: Mapping[str, ShardHandle],
        registry: RegistryHandle,
        scheduler: PermitHandle | None,
        target: Callable[[], TargetHandle],
    ) -> None:
        """Start the thread.

        Args:
            settings: see SyntheticSettings.
            shards: topic to actor handle of its ReplayShard.
            registry: actor handle of the WeightRegistry, for topics that are added later.
            scheduler: actor handle of the TrainerScheduler; None always grants permits.
            target: ``find_handle`` of ServeTargetClient.
        """
        self._timeout_s = settings.timeout_s
        self._handles = (dict(shards), registry, scheduler)
        self._generator = SyntheticAnswerGenerator(settings)
        self._target = target
        self._background = BackgroundLoop("paceline-synthetic", self._prepare, settings.refresh_s)
        self._background.start()

    def status(self) -> SyntheticStatus:
        """The generator's counts, and its failures."""
        background = self._background
        return SyntheticStatus(
            **self._generator.counts,
            failures=background.failures,
            last_error=background.last_error,
        )

    def _prepare(self) -> Callable[[], bool]:
        from paceline.actors.training.client import RayTrainerClient

        client = RayTrainerClient(*self._handles, self._timeout_s)
        target = ServeTargetClient(self._target, client.acquire_permit)

        def run_once() -> bool:
            client.added_topics()
            return self._generator.run_once(client, target)

        return run_once
