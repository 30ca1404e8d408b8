"""The target replica: the engine behind an asynchronous, Serve-friendly face."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from torch import Tensor

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.compatibility import read_config
from paceline.actors.engine.engine_loop import EngineLoop
from paceline.actors.engine.model_loader import resolve_device
from paceline.actors.engine.request import FAILED, GenerationChunk, GenerationRequest, merge_chunks
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.stats import EngineFigures
from paceline.actors.replay.record import ReplayRecord, encode
from paceline.actors.replay.selection import RecordRateLimiter, is_scored
from paceline.actors.speculation.pending_updates import (
    AddExpert,
    RemoveCandidate,
    SetLimits,
    SwapWeights,
)
from paceline.actors.speculation.pool.proposer import PoolProposer
from paceline.actors.speculation.pool.sessions import Leases
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.subscriber import RegistrySubscriber
from paceline.actors.weights.topics import TopicsView

logger = logging.getLogger(__name__)

_REPEAT_S = 1.0  # while nothing changes: who is silent for long counts as gone
_CHANGES_S = 0.2  # a busy replica's changes wait for so long, at most


class LoadReporter:
    """Tells of the first request, the last one's end and bursts at once, of other changes later.

    A call costs both sides a share of a millisecond, on the engine's thread too: with a report
    for every request that comes or goes, a busy server has a hundred a second. A trainer that may
    compute beside a light load hears of a heavier one so much later, where it is no burst. The
    caller's thread alone uses it; it never fails.
    """

    def __init__(self, send: Callable[[int, int], object], clock: Callable[[], float]) -> None:
        """Nothing is told yet.

        Args:
            send: takes (running, waiting) without waiting; where it raises, they are lost.
            clock: seconds, monotonic.
        """
        self._send = send
        self._clock = clock
        self._told: tuple[int, int] | None = None
        self._told_at = 0.0

    def __call__(self, running: int, waiting: int) -> None:
        """Take the present load; call it after every round and once when all is done."""
        load, now = (running, waiting), self._clock()
        if self._told is not None and now - self._told_at < self._least_s(self._told, load):
            return
        self._told, self._told_at = load, now
        try:
            self._send(running, waiting)
        except Exception:
            logger.warning("load was not reported", exc_info=True)

    @staticmethod
    def _least_s(told: tuple[int, int], load: tuple[int, int]) -> float:
        """Seconds that have to be between a report and one of this load."""
        if load == told:
            return _REPEAT_S
        burst = sum(load) > 2 * sum(told)  # a trainer may have leave beside what was told
        return _CHANGES_S if told[0] and sum(load) and not burst else 0.0  # (0, 1) ends in a round


_EVERY_S = 1.0


class OutcomeReporter:
    """Collects outcomes and sends them together. The caller's thread alone uses it."""

    def __init__(
        self,
        send: Callable[[list[DraftOutcome]], object],
        clock: Callable[[], float],
        every_s: float = _EVERY_S,
    ) -> None:
        """Begin with nothing.

        Args:
            send: takes outcomes without waiting; where it raises, they are lost.
            clock: seconds, monotonic.
            every_s: shortest time between two calls while requests run.
        """
        self._send = send
        self._clock = clock
        self._every_s = every_s
        self._pending: list[DraftOutcome] = []
        self._sent_at = clock()

    def add(self, outcome: DraftOutcome) -> None:
        """Keep an outcome until the next :meth:`flush` that is due."""
        self._pending.append(outcome)

    def flush(self, *, idle: bool) -> None:
        """Send what there is, if it is time; at once where nothing runs any more."""
        now = self._clock()
        if not self._pending or not (idle or now - self._sent_at >= self._every_s):
            return
        outcomes, self._pending, self._sent_at = self._pending, [], now
        try:
            self._send(outcomes)
        except Exception:
            logger.warning("%d outcomes were not reported", len(outcomes), exc_info=True)


def row_load(running: int, waiting: int, rows: int) -> float:
    """The load in full replicas; it rises with either count.

    A replica with a queue counts as full, however many of its rows run: what waits has no row, or
    no memory for keys and values.

    Args:
        running: requests being decoded.
        waiting: requests in the queue.
        rows: requests that may be decoded at once.

    Returns:
        0.0 for nothing, 1.0 for full, more with a queue: 2.0 where ``rows`` requests wait.
    """
    occupied = 1.0 if waiting else min(running / rows, 1.0)
    return occupied + waiting / rows


_BEATS_PER_TIMEOUT = 4
_ROUNDS_HANG = 3  # in units of the timeout: then the replica is given up
_BEAT = GenerationChunk(text="", token_ids=())


class TargetReplica:
    """Hosts the target, proposes with the experts, logs what the target said.

    The shards, the registry, the scheduler and the scorer may be dead or slow at any time: records
    are then lost, drafts stay as they are, load goes unreported; no request notices.
    """

    def __init__(
        self,
        settings: TargetSettings,
        shards: Mapping[str, Any] | None = None,
        registry: Any = None,
        scheduler: Any = None,
        experts: Mapping[str, Any] | None = None,
        scorer: Any = None,
    ) -> None:
        """Load the models and start the engine.

        Args:
            settings: see TargetSettings.
            shards: actor handle of the replay shard of every topic; None keeps no records.
            registry: actor handle of the weight registry; None never swaps.
            scheduler: actor handle of the trainer scheduler; None reports nothing.
            experts: Serve handle of every expert's deployment, where drafts are placed in a pool.
            scorer: actor handle of what compares experts on some of the records, or None.
        """
        self._shards = dict(shards or {})
        self._scorer = scorer
        self._settings = settings
        self._scored = (settings.scored_share, settings.held_out_fraction)
        self._record_limiter = RecordRateLimiter(settings.max_records_per_s, time.monotonic)
        self._replica_id = _replica_id()
        self._stall_timeout_s = settings.stall_timeout_s
        self._open: set[asyncio.Queue[GenerationChunk]] = set()
        self._beating: asyncio.Task[None] | None = None
        self._load_reports: LoadReporter | None = None
        if scheduler is not None:
            self._load_reports = LoadReporter(
                partial(scheduler.report_load.remote, self._replica_id), time.monotonic
            )
        self._pool = _pool(settings) if settings.placement == "pool" else None
        self._leases: Leases | None = None
        if self._pool is not None:  # experts load meanwhile
            self._leases = Leases(self._pool, experts or {}, self._replica_id)
        self._experts = set(settings.drafts)
        self._leased = set(experts or {})
        self._failed: dict[str, DraftOutcome] = {}  # by expert, the last candidate that did
        self._outcomes: OutcomeReporter | None = None
        if registry is not None:
            self._outcomes = OutcomeReporter(registry.report.remote, time.monotonic)
        engine, _, self._facts = build_engine(settings, self._pool)
        self._loop = EngineLoop(
            engine,
            num_threads=settings.num_threads,
            on_record=self._store if self._shards else None,
            on_load=self._report,
            on_outcome=self._tell if self._outcomes is not None else None,
            chunks_per_s=settings.stream_chunks_per_s,
        )
        if registry is not None:
            RegistrySubscriber(
                registry,
                on_topics=self._take_topics,
                # the experts of a pool load their own weights
                on_weights=self._load_weights if self._pool is None else None,
                failed=lambda: list(self._failed.copy().values()),
            ).start()

    async def generate(
        self, request: GenerationRequest, whole: bool = False
    ) -> AsyncIterator[GenerationChunk]:
        """Stream an answer; closing the iterator drops the request.

        While the engine works or the request waits, an empty chunk comes several times in every
        ``stall_timeout_s``: where even that is missing, the replica hangs.

        Args:
            request: see GenerationRequest.
            whole: True for an answer that nobody reads before its end: what has come is handed
                out as one chunk with every sign of life, the rest at the end.
        """
        request = self._sparing(request)
        chunks: asyncio.Queue[GenerationChunk] = asyncio.Queue()
        events = asyncio.get_running_loop()

        def deliver(chunk: GenerationChunk) -> None:
            events.call_soon_threadsafe(chunks.put_nowait, chunk)

        self._loop.submit(request, deliver, whole=whole)
        finished = False
        parts: list[GenerationChunk] = []
        try:
            with self._beats(chunks):
                while not finished:
                    chunk = await chunks.get()
                    if chunk.finish_reason in FAILED:
                        chunk = replace(chunk, replica_id=self._replica_id)
                        if parts:  # no token is taken from a chunk that tells of a failure
                            yield merge_chunks(parts)
                            parts.clear()
                    finished = chunk.finish_reason is not None
                    parts.append(chunk)
                    if finished or chunk is _BEAT or not whole:
                        yield merge_chunks(parts)
                        parts.clear()
        finally:
            if not finished:
                self._loop.abort(request.run_id)

    @contextmanager
    def _beats(self, chunks: asyncio.Queue[GenerationChunk]) -> Iterator[None]:
        """Signs of life go into the queue meanwhile."""
        self._open.add(chunks)
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            self._open.discard(chunks)

    async def _beat(self) -> None:
        """Tell every open stream that its request lives, as long as rounds come to their ends."""
        while self._open:
            await asyncio.sleep(self._stall_timeout_s / _BEATS_PER_TIMEOUT)
            if self._loop.healthy and self._loop.silent_s() < self._stall_timeout_s:
                for chunks in self._open:
                    chunks.put_nowait(_BEAT)

    async def describe(self, attempt: int = 0) -> dict[str, Any]:  # noqa: ARG002 (see below)
        """What runs here and how busy it is.

        Args:
            attempt: how many replicas gave no answer before; the choice of this one went by it.
        """
        running, waiting = self._loop.load()
        blocks, available = self._loop.kv_blocks
        pool = {} if self._pool is None else {"experts": self._pool.describe()}
        return (
            self._facts
            | pool
            | {
                "replica_id": self._replica_id,
                "drafts": self._loop.drafts(),
                "draft_failures": self._loop.draft_failures,
                "running": running,
                "waiting": waiting,
                "kv_blocks_total": blocks,
                "kv_blocks_available": available,
                "preemptions": self._loop.preemptions,
            }
        )

    def figures(self) -> EngineFigures:
        """What the engine is at and has done; any thread may ask."""
        return self._loop.figures()

    def experts(self) -> dict[str, dict[str, Any]]:
        """State and counts of every expert of the pool; empty where drafts are colocated."""
        return {} if self._pool is None else self._pool.describe()

    def retune(
        self,
        max_speculative_tokens: int | None = None,
        probe_share: float | None = None,
        scored_share: float | None = None,
    ) -> None:
        """Other values from the next round on, None those of the settings.

        Args:
            max_speculative_tokens: drafted at most where the controller chooses.
            probe_share: of the rounds' time, for looks at drafts that do not seem to pay.
            scored_share: see TargetSettings.

        Raises:
            ValueError: more tokens than the settings allow, for which there may be no memory, or
                a number that no controller follows; nothing is changed.
        """
        most = self._settings.max_speculative_tokens
        if max_speculative_tokens is not None and max_speculative_tokens > most:
            raise ValueError(f"max_speculative_tokens: at most {most}, as configured")
        fixed = self._settings.num_speculative_tokens is not None
        if fixed and not (max_speculative_tokens is None and probe_share is None):
            raise ValueError("max_speculative_tokens, probe_share: the number of tokens is fixed")
        self._loop.update(SetLimits(max_speculative_tokens, probe_share))
        share = self._settings.scored_share if scored_share is None else scored_share
        self._scored = (share, self._settings.held_out_fraction)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of replicas goes by; Serve asks now and then where it is not fixed."""
        return {"load": row_load(*self._loop.load(), self._settings.max_num_seqs)}

    def check_health(self) -> None:
        """Serve's health check; RuntimeError has Serve replace this replica."""
        if not self._loop.healthy:
            raise RuntimeError("the engine has stopped or keeps failing")
        if self._loop.silent_s() > _ROUNDS_HANG * self._stall_timeout_s:
            raise RuntimeError("a round of the engine does not come to its end")

    def _sparing(self, request: GenerationRequest) -> GenerationRequest:
        """The request without its record, where its topic has had enough of late."""
        limited = request.has_record and not request.background and self._shards
        if limited and not self._record_limiter.acquire(request.topic):
            return replace(request, recorded=False)
        return request

    def _store(self, record: ReplayRecord) -> None:
        shard = self._shards.get(record.topic)
        if shard is None:
            return
        try:
            data = encode(record)
            shard.insert.remote(data, self._record_limiter.take_dropped(record.topic))
            if self._scorer is not None and is_scored(record, *self._scored):
                self._scorer.offer.remote(data)
        except Exception:
            logger.warning("record of %s was not kept", record.topic, exc_info=True)

    def _tell(self, outcome: DraftOutcome) -> None:
        if self._outcomes is not None:
            self._outcomes.add(outcome)
        if outcome.failed:
            self._failed[outcome.expert] = outcome

    def _report(self, running: int, waiting: int) -> None:
        """Tell registry and scheduler what has changed, where it is time."""
        if self._outcomes is not None:
            self._outcomes.flush(idle=running + waiting == 0)
        if self._load_reports is not None:
            self._load_reports(running, waiting)

    def _load_weights(self, slot: str, version: int, state: Mapping[str, Tensor] | None) -> None:
        update = RemoveCandidate(slot) if state is None else SwapWeights(slot, version, state)
        self._loop.update(update)

    def _take_topics(self, view: TopicsView) -> None:
        """Have experts for added topics, and shards for their records; twice is fine."""
        for topic in view.topics:
            if topic.name not in self._experts and self._pool is None:
                self._loop.update(AddExpert(topic.name, topic.like))
            self._experts.add(topic.name)
        for name, parts in view.parts.items():
            if name not in self._shards:  # a new dictionary: the engine's thread reads it
                self._shards = {**self._shards, name: parts.shard}
            if parts.expert is not None and name not in self._leased:
                self._lease(name, *parts.expert)

    def _lease(self, expert: str, deployment: str, application: str) -> None:
        """Draft with a further expert of the pool."""
        if self._pool is not None and self._leases is not None:
            self._pool.add(expert)
            self._leases.add(expert, serve.get_deployment_handle(deployment, application))
            self._leased.add(expert)


def _replica_id() -> str:
    """Serve's own name of this replica, which the choice of replicas knows; else one like it."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:  # not in Serve
        return uuid.uuid4().hex[:12]


def _pool(settings: TargetSettings) -> PoolProposer:
    """The proposer over experts of their own, without connections yet."""
    return PoolProposer(
        list(settings.drafts),
        device=resolve_device(settings.device),
        vocab_size=int(read_config(settings.model_path, "target")["vocab_size"]),
        round_timeout_s=settings.round_timeout_ms / 1e3,
        clock=time.monotonic,
    )
