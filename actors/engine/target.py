"""Ray Serve replica of the target: the engine loop behind asynchronous methods."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from torch import Tensor

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.compatibility import read_config
from paceline.actors.engine.engine_loop import EngineLoop
from paceline.actors.engine.grammar import GrammarError
from paceline.actors.engine.model_loader import resolve_device
from paceline.actors.engine.request import FAILED, GenerationChunk, GenerationRequest, merge_chunks
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.stats import EngineStats
from paceline.actors.engine.target_handle import TargetStatus
from paceline.actors.engine.turn_marks import turn_marks
from paceline.actors.handles import RemoteMethod
from paceline.actors.replay.conversations import Conversations
from paceline.actors.replay.deliveries import Deliveries
from paceline.actors.replay.held_records import MAX_BYTES, HeldRecords
from paceline.actors.replay.record import ReplayRecord, encode, is_synthetic
from paceline.actors.replay.selection import LeftOut, is_scored
from paceline.actors.replay.shard import ShardHandle
from paceline.actors.speculation.pending_updates import (
    AddExpert,
    RemoveCandidate,
    SetLimits,
    SwapWeights,
)
from paceline.actors.speculation.pool.client import ExpertStats
from paceline.actors.speculation.pool.proposer import PoolProposer
from paceline.actors.speculation.pool.sessions import SessionManager, SessionStream
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.subscriber import RegistryHandle, RegistrySubscriber
from paceline.actors.weights.topics import TopicsView

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_REPEAT_S = 1.0  # between reports of a busy replica: a silent one counts as gone


class LoadReporter:
    """Reports when work starts, ends or doubles at once, and otherwise once a second.

    A call costs the scheduler a millisecond or two, and the engine's thread a fraction of one, and
    a busy server would make a hundred a second. Trainers that run beside a light load see a slow
    change that much later. Not thread-safe; never raises.
    """

    def __init__(self, send: Callable[[int, int], object], clock: Callable[[], float]) -> None:
        """Set where to report to.

        Args:
            send: takes (running, waiting) without blocking; if it raises, the report is lost.
            clock: monotonic seconds.
        """
        self._send = send
        self._clock = clock
        self._reported: tuple[int, int] | None = None
        self._reported_at = 0.0

    def update(self, running: int, waiting: int) -> None:
        """Report the load if it is due; call it after every round and when all is done."""
        load, now = (running, waiting), self._clock()
        soon = now - self._reported_at < _REPEAT_S
        if self._reported is not None and soon and not self._is_urgent(self._reported, load):
            return
        self._reported, self._reported_at = load, now
        try:
            self._send(running, waiting)
        except Exception:
            logger.warning("load was not reported", exc_info=True)

    @staticmethod
    def _is_urgent(reported: tuple[int, int], load: tuple[int, int]) -> bool:
        """Return whether a load is reported at once after the one before."""
        burst = sum(load) > 2 * sum(reported)  # trainers may run beside the reported load
        # (0, 1) ends within a round.
        return load != reported and (burst or not reported[0] or not sum(load))


_EVERY_S = 1.0


class OutcomeReporter:
    """Sends draft outcomes to the registry in batches. Not thread-safe; never raises."""

    def __init__(
        self,
        send: Callable[[list[DraftOutcome]], object],
        clock: Callable[[], float],
        every_s: float = _EVERY_S,
    ) -> None:
        """Set where to report to.

        Args:
            send: takes outcomes without blocking; if it raises, they are lost.
            clock: monotonic seconds.
            every_s: minimum seconds between two calls while requests run.
        """
        self._send = send
        self._clock = clock
        self._every_s = every_s
        self._pending: list[DraftOutcome] = []
        self._sent_at = clock()

    def add(self, outcome: DraftOutcome) -> None:
        """Add an outcome to the next batch."""
        self._pending.append(outcome)

    def flush(self, *, idle: bool) -> None:
        """Send the batch if it is due, or at once if the engine is idle."""
        now = self._clock()
        if not self._pending or not (idle or now - self._sent_at >= self._every_s):
            return
        outcomes, self._pending, self._sent_at = self._pending, [], now
        try:
            self._send(outcomes)
        except Exception:
            logger.warning("%d outcomes were not reported", len(outcomes), exc_info=True)


def replica_load(running: int, waiting: int, max_num_seqs: int) -> float:
    """Return the load in units of full replicas; it rises with either count.

    A replica with a queue counts as full even if rows are free, since the KV cache may be full.

    Args:
        running: requests with a row.
        waiting: requests in the queue.
        max_num_seqs: rows.

    Returns:
        0.0 if idle, 1.0 if full, 2.0 with ``max_num_seqs`` waiting requests.
    """
    occupied = 1.0 if waiting else min(running / max_num_seqs, 1.0)
    return occupied + waiting / max_num_seqs


def _has_arrived(reference: Any) -> bool:
    if not isinstance(reference, ray.ObjectRef):
        return True
    return bool(ray.wait([reference], timeout=0, fetch_local=False)[0])


_HEARTBEATS_PER_TIMEOUT = 4
_MAX_STALL = 3  # stall timeouts until the replica is replaced
_HEARTBEAT = GenerationChunk(text="", token_ids=())
_PURGE_WAIT_S, _CLOSE_WAIT_S = 10.0, 2.0
_SCORER = "(scorer)"  # no valid topic


class LoadHandle(Protocol):
    """Actor handle of the trainer scheduler."""

    @property
    def report_load(self) -> RemoteMethod[[str, int, int], None]:
        """See TrainerScheduler."""


class OfferHandle(Protocol):
    """Actor handle of the scorer."""

    @property
    def offer(self) -> RemoteMethod[[bytes], None]:
        """See Scorer."""


class TargetReplica:
    """Serves the target with its drafts, and records what the target computes.

    Shards, registry, scheduler and scorer may be dead or slow: then records are lost, drafts keep
    their weights and load goes unreported, but no request is affected.
    """

    def __init__(
        self,
        settings: TargetSettings,
        shards: Mapping[str, ShardHandle] | None = None,
        registry: RegistryHandle | None = None,
        scheduler: LoadHandle | None = None,
        experts: Mapping[str, DeploymentHandle[Any]] | None = None,
        scorer: OfferHandle | None = None,
    ) -> None:
        """Load the models and start the engine.

        Args:
            settings: see TargetSettings.
            shards: replay shard actor by topic; None keeps no records.
            registry: weight registry actor; None never swaps weights.
            scheduler: trainer scheduler actor; None reports no load.
            experts: Serve handle of each expert's deployment, if drafts are placed in a pool.
            scorer: actor that compares experts on some of the records, or None.
        """
        self._shards = dict(shards or {})
        self._scorer = scorer
        self._settings = settings
        self._scored = (settings.sample_share, settings.held_out_fraction)
        self._left_out = LeftOut()
        self._held_records = HeldRecords(self._left_out)
        self._deliveries = Deliveries(_has_arrived, MAX_BYTES)
        self._hanging: set[str] = set()  # topics whose shards take nothing
        self._replica_id = _replica_id()
        self._stall_timeout_s = settings.stall_timeout_s
        self._streams: set[asyncio.Queue[GenerationChunk]] = set()
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._load_reporter: LoadReporter | None = None
        if scheduler is not None:
            self._load_reporter = LoadReporter(
                partial(scheduler.report_load.remote, self._replica_id), time.monotonic
            )
        self._pool = _pool(settings) if settings.placement == "pool" else None
        self._sessions = None if self._pool is None else SessionManager(self._pool)
        self._connected: set[str] = set()
        for expert, handle in (experts or {}).items():  # connects while the experts load
            self._connect(expert, handle)
        self._experts = set(settings.drafts)
        self._failed: dict[str, DraftOutcome] = {}  # of the latest failed candidate, by expert
        self._outcome_reporter: OutcomeReporter | None = None
        if registry is not None:
            self._outcome_reporter = OutcomeReporter(registry.report.remote, time.monotonic)
        engine, tokenizer, self._facts = build_engine(settings, self._pool)
        self._conversations = _conversations(tokenizer)
        self._grammars = engine.grammars
        self._suffix_store = engine.draft_runner.suffix_store
        self._loop = EngineLoop(
            engine,
            num_threads=settings.threads,
            on_record=self._insert_record if self._shards else None,
            on_load=self._report,
            on_outcome=self._add_outcome if self._outcome_reporter is not None else None,
            chunks_per_s=settings.stream_chunks_per_s,
            held_records=self._held_records,
        )
        if registry is not None:
            RegistrySubscriber(
                registry,
                on_topics=self._add_topics,
                # the experts of a pool load their own weights
                on_weights=self._load_weights if self._pool is None else None,
                failed=lambda: list(self._failed.copy().values()),
                name=self._replica_id,
            ).start()

    async def generate(
        self, request: GenerationRequest, whole: bool = False
    ) -> AsyncIterator[GenerationChunk]:
        """Stream an answer; closing the iterator aborts the request.

        Several heartbeats, empty chunks, are sent per ``stall_timeout_s`` while the engine works,
        also if the request waits; without them the replica hangs.

        Args:
            request: see GenerationRequest.
            whole: the client does not stream: chunks are merged until a heartbeat or the end.
        """
        request = self._limit_records(request)
        if request.grammar:
            with suppress(GrammarError):  # the engine reports it
                await asyncio.to_thread(self._grammars.compile, request.grammar)
        chunks: asyncio.Queue[GenerationChunk] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()

        def deliver(chunk: GenerationChunk) -> None:
            event_loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        self._loop.submit(request, deliver, whole=whole)
        finished = False
        parts: list[GenerationChunk] = []
        try:
            with self._heartbeats(chunks):
                while not finished:
                    chunk = await chunks.get()
                    if chunk.finish_reason in FAILED:
                        chunk = replace(chunk, replica_id=self._replica_id)
                        if parts:  # apart, since tokens of a failure chunk are ignored
                            yield merge_chunks(parts)
                            parts.clear()
                    finished = chunk.finish_reason is not None
                    parts.append(chunk)
                    if finished or chunk is _HEARTBEAT or not whole:
                        yield merge_chunks(parts)
                        parts.clear()
        finally:
            if not finished:
                self._loop.abort(request.run_id)

    @contextmanager
    def _heartbeats(self, chunks: asyncio.Queue[GenerationChunk]) -> Iterator[None]:
        """Put heartbeats into the queue within the context."""
        self._streams.add(chunks)
        if self._heartbeat_task is None or self._heartbeat_task.done():
            self._heartbeat_task = asyncio.create_task(self._send_heartbeats())
        try:
            yield
        finally:
            self._streams.discard(chunks)

    async def _send_heartbeats(self) -> None:
        """Put heartbeats into every open stream while the engine's rounds end in time."""
        while self._streams:
            await asyncio.sleep(self._stall_timeout_s / _HEARTBEATS_PER_TIMEOUT)
            if self._loop.healthy and self._loop.round_age_s() < self._stall_timeout_s:
                for chunks in self._streams:
                    chunks.put_nowait(_HEARTBEAT)

    async def status(self, attempt: int = 0) -> TargetStatus:  # noqa: ARG002 (see below)
        """Return the model and the load.

        Args:
            attempt: number of replicas that did not answer before, for the request router.
        """
        stats = self._loop.stats()
        return TargetStatus(
            **asdict(self._facts),
            replica_id=self._replica_id,
            drafts=stats.drafts,
            draft_failures=stats.draft_failures,
            running=stats.running,
            waiting=stats.waiting,
            kv_blocks_total=stats.kv_blocks,
            kv_blocks_available=stats.kv_blocks_available,
            preemptions=stats.preemptions,
            experts=self.experts(),
        )

    def stats(self) -> EngineStats:
        """Return the engine's statistics; thread-safe."""
        return self._loop.stats()

    def experts(self) -> dict[str, ExpertStats]:
        """Return state and counts of every expert of the pool; empty if drafts are colocated."""
        return {} if self._pool is None else self._pool.stats()

    def set_limits(
        self,
        max_speculative_tokens: int | None = None,
        probe_share: float | None = None,
        sample_share: float | None = None,
    ) -> None:
        """Change limits from the next round on; None restores the settings' value.

        Args:
            max_speculative_tokens: limit of what the controller chooses.
            probe_share: share of the rounds' time for probing drafts that do not seem to pay.
            sample_share: see TargetSettings.

        Raises:
            ValueError: more tokens than in the settings, for which there may be no memory, or a
                limit of the controller while the number of tokens is fixed; nothing is changed.
        """
        most = self._settings.max_speculative_tokens
        if max_speculative_tokens is not None and max_speculative_tokens > most:
            raise ValueError(f"max_speculative_tokens: at most {most}, as configured")
        fixed = self._settings.num_speculative_tokens is not None
        if fixed and not (max_speculative_tokens is None and probe_share is None):
            raise ValueError("max_speculative_tokens, probe_share: the number of tokens is fixed")
        self._loop.update(SetLimits(max_speculative_tokens, probe_share))
        share = self._settings.sample_share if sample_share is None else sample_share
        self._scored = (share, self._settings.held_out_fraction)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics of Serve's autoscaler, which calls it periodically."""
        return {"load": replica_load(*self._loop.load(), self._settings.max_num_seqs)}

    async def purge(self, request_id: str | None, topic: str | None) -> int:
        """Remove an answer (None: all) of a topic (None: all) from records and suffix drafts.

        All answers of all topics leave the prefix cache too, which does not know whose a block is.
        What was handed over before has reached shard and scorer when this returns, so that a call
        to these which follows finds it.
        """
        removed = self._held_records.remove(request_id, topic)
        if self._suffix_store is not None:
            removed += self._suffix_store.remove(request_id, topic)
        if request_id is None and topic is None:
            self._loop.reset_prefix_cache()
        await asyncio.to_thread(self._wait_for_arrivals, _PURGE_WAIT_S)
        return removed

    def _wait_for_arrivals(self, timeout_s: float) -> None:
        """Wait until what was handed over has arrived, or its receivers are dead."""
        sent = [ref for ref in self._deliveries.latest() if isinstance(ref, ray.ObjectRef)]
        if sent:
            ray.wait(sent, num_returns=len(sent), timeout=timeout_s, fetch_local=False)

    def __del__(self) -> None:
        """Hand over all records; Serve calls it when no request runs any more."""
        if hasattr(self, "_loop"):  # the constructor did not raise
            self._loop.close()
            self._wait_for_arrivals(_CLOSE_WAIT_S)

    def check_health(self) -> None:
        """Raise RuntimeError if Serve should replace this replica."""
        # Serve calls this every five seconds, when idle too.
        self._held_records.expire(time.time() - self._settings.retention_s)
        if self._suffix_store is not None:
            self._suffix_store.expire()
        if not self._loop.healthy:
            raise RuntimeError("the engine has stopped or keeps failing")
        if self._loop.round_age_s() > _MAX_STALL * self._stall_timeout_s:
            raise RuntimeError("a round of the engine hangs")

    def _limit_records(self, request: GenerationRequest) -> GenerationRequest:
        """Drop the record of a request that nothing takes, or for which there is no room."""
        if not self._shards:
            return replace(request, recorded=False)
        limited = request.has_record and not request.background
        if not limited or self._held_records.has_room(request.topic):
            return request
        self._left_out.add(request.topic)
        return replace(request, replayed=False)

    def _insert_record(self, record: ReplayRecord) -> None:
        shard = self._shards.get(record.topic)
        if shard is None:
            return
        try:
            if not self._deliveries.accepts(record.topic):
                if record.topic not in self._hanging:
                    logger.warning("the shard of %s hangs, its records are lost", record.topic)
                self._hanging.add(record.topic)
                self._left_out.add(record.topic)
                return
            self._hanging.discard(record.topic)
            if self._conversations is not None and not is_synthetic(record.request_id):
                found = self._conversations.find(record.prompt_token_ids)
                record = replace(record, first_prompt=found)
            data = encode(record)
            left_out = self._left_out.take(record.topic)
            self._deliveries.sent(record.topic, shard.insert.remote(data, left_out), len(data))
            if self._scorer is None or not is_scored(record, *self._scored):
                return
            if self._deliveries.accepts(_SCORER):
                self._deliveries.sent(_SCORER, self._scorer.offer.remote(data), len(data))
        except Exception:
            logger.warning("a record of %s was not inserted", record.topic, exc_info=True)

    def _add_outcome(self, outcome: DraftOutcome) -> None:
        if self._outcome_reporter is not None:
            self._outcome_reporter.add(outcome)
        if outcome.failed:
            self._failed[outcome.expert] = outcome

    def _report(self, running: int, waiting: int) -> None:
        """Report outcomes and load if they are due."""
        if self._outcome_reporter is not None:
            self._outcome_reporter.flush(idle=running + waiting == 0)
        if self._load_reporter is not None:
            self._load_reporter.update(running, waiting)

    def _load_weights(self, slot: str, version: int, state: Mapping[str, Tensor] | None) -> None:
        update = RemoveCandidate(slot) if state is None else SwapWeights(slot, version, state)
        self._loop.update(update)

    def _add_topics(self, view: TopicsView) -> None:
        """Add the experts and replay shards of new topics; idempotent."""
        for topic in view.topics:
            if topic.name not in self._experts and self._pool is None:
                self._loop.update(AddExpert(topic.name, topic.like))
            self._experts.add(topic.name)
        for name, parts in view.actors.items():
            if name not in self._shards:  # a new dictionary: the engine's thread reads it
                self._shards = {**self._shards, name: parts.shard}
            if parts.expert is not None and name not in self._connected:
                self._connect(name, serve.get_deployment_handle(*parts.expert))

    def _connect(self, expert: str, handle: DeploymentHandle[Any]) -> None:
        """Connect to an expert of the pool."""
        if self._pool is not None and self._sessions is not None:
            self._pool.add_client(expert)
            self._sessions.add(expert, partial(_session_stream, handle, self._replica_id))
            self._connected.add(expert)


def _conversations(tokenizer: PreTrainedTokenizerBase) -> Conversations | None:
    """What finds conversations; None if the chat template does not tell where a turn ends."""
    try:
        return Conversations(turn_marks(tokenizer).cue)
    except ValueError as error:
        logger.info("records of a conversation's turns are not kept together: %s", error)
        return None


def _replica_id() -> str:
    """Return Serve's id of this replica, or a random one outside Serve."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:  # not in Serve
        return uuid.uuid4().hex[:12]


def _session_stream(handle: DeploymentHandle[Any], replica_id: str) -> SessionStream:
    stream: SessionStream = handle.options(stream=True).open_session.remote(replica_id)
    return stream


def _pool(settings: TargetSettings) -> PoolProposer:
    """Make the proposer of the pool, without connections."""
    return PoolProposer(
        list(settings.drafts),
        device=resolve_device(settings.device),
        vocab_size=int(read_config(settings.model_path, "target")["vocab_size"]),
        round_timeout_s=settings.round_timeout_ms / 1e3,
        clock=time.monotonic,
    )
