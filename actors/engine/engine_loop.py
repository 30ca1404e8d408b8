"""The engine's thread: runs submitted requests and delivers their chunks in batches."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.engine.grammar import GrammarError
from paceline.actors.engine.request import (
    FAILED,
    FINISH_ERROR,
    FINISH_FAULT,
    FINISH_GRAMMAR,
    FINISH_REFUSED,
    FINISH_YIELDED,
    GenerationChunk,
    GenerationRequest,
    merge_chunks,
)
from paceline.actors.engine.stats import EngineStats, RequestStats
from paceline.actors.replay.held_records import HeldRecords
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.replay.selection import LeftOut
from paceline.actors.speculation.pending_updates import Update
from paceline.actors.weights.draft_outcomes import DraftOutcome

logger = logging.getLogger(__name__)

Deliver = Callable[[GenerationChunk], None]
_WHOLE_INTERVAL_S = 1.0  # per answer that is not streamed


@dataclass(slots=True)
class _Stream:
    deliver: Deliver
    whole: bool
    pending: list[GenerationChunk] = field(default_factory=list)
    sent_at: float = float("-inf")


class StreamBatcher:
    """Merges the chunks of open streams and sends those of all together.

    What is sent together costs every process on its way one waking. The first chunk of a stream is
    sent at once, and the last with all that is pending. Used by the engine's thread alone.
    """

    def __init__(
        self, chunks_per_s: float, clock: Callable[[], float], on_lost: Callable[[str], None]
    ) -> None:
        """Set the rate.

        Args:
            chunks_per_s: of each stream; 0 sends every chunk at once.
            clock: monotonic seconds.
            on_lost: called with the name of a stream that was closed because ``deliver`` raised.
        """
        self._interval_s = 1.0 / chunks_per_s if chunks_per_s else 0.0
        self._clock = clock
        self._on_lost = on_lost
        self._round_at = float("-inf")  # end of the last round
        self._flushed_at = float("-inf")  # the last time that all live streams were sent
        self._streams: dict[str, _Stream] = {}

    @property
    def names(self) -> list[str]:
        """Names of the open streams."""
        return list(self._streams)

    def __len__(self) -> int:
        """Number of open streams; safe from any thread."""
        return len(self._streams)

    def open(self, name: str, deliver: Deliver, *, whole: bool = False) -> None:
        """Open a stream; ``whole`` ones are sent once a second and when they end."""
        self._streams[name] = _Stream(deliver, whole)

    def close(self, name: str) -> None:
        """Close a stream if it is open, and drop its pending chunks."""
        self._streams.pop(name, None)

    def put(self, name: str, chunk: GenerationChunk) -> None:
        """Send a chunk now or with later ones; one with a finish reason closes its stream."""
        stream = self._streams.get(name)
        if stream is None:
            return
        finished = chunk.finish_reason is not None
        if finished:
            self.close(name)
        if chunk.finish_reason in FAILED and stream.pending:
            self._send(name, stream)  # apart, since a retry goes on from these tokens
        stream.pending.append(chunk)
        if finished or stream.sent_at == float("-inf") or not self._interval_s:
            self._send(name, stream)

    def flush(self) -> None:
        """Send the pending chunks if they are due; call it after every round.

        They are sent at the end of the round that is nearest to their time.
        """
        now = self._clock()
        round_s, self._round_at = now - self._round_at, now
        due = now - self._flushed_at >= self._interval_s - min(round_s, self._interval_s) / 2
        if due:
            self._flushed_at = now
        for name, stream in list(self._streams.items()):
            is_due = now - stream.sent_at >= _WHOLE_INTERVAL_S if stream.whole else due
            if stream.pending and is_due:
                self._send(name, stream)

    def _send(self, name: str, stream: _Stream) -> None:
        """Deliver the pending chunks as one; if that fails, close this stream alone."""
        chunk = merge_chunks(stream.pending)
        stream.pending, stream.sent_at = [], self._clock()
        try:
            stream.deliver(chunk)
        except Exception:
            logger.warning("a chunk of request %s was not delivered", name, exc_info=True)
            self.close(name)
            self._on_lost(name)


_MAX_FAULTS = 5  # consecutive; a single request causes fewer


class EngineLoop:
    """Runs an engine on one thread.

    All methods are thread-safe. ``deliver``, ``on_record``, ``on_load`` and ``on_outcome`` are
    called on the engine's thread: they must be quick and must not raise.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_threads: int,
        on_record: Callable[[ReplayRecord], None] | None = None,
        on_load: Callable[[int, int], None] | None = None,
        on_outcome: Callable[[DraftOutcome], None] | None = None,
        chunks_per_s: float = 0.0,
        held_records: HeldRecords | None = None,
    ) -> None:
        """Start the thread.

        Args:
            engine: used by this thread alone from now on.
            num_threads: torch threads of the forwards; OpenMP counts them per thread.
            on_record: called with the replay records of finished requests, once they are due.
            on_load: called with (running, waiting) after every round and when all is done.
            on_outcome: called with the draft outcome of a request.
            chunks_per_s: see StreamBatcher.
            held_records: those that are not due yet; None makes a queue of its own.
        """
        self._engine = engine
        self._num_threads = num_threads
        self._on_record = on_record
        self._on_load = on_load
        self._on_outcome = on_outcome
        self._held_records = HeldRecords(LeftOut()) if held_records is None else held_records
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams = StreamBatcher(chunks_per_s, time.monotonic, self._abort)
        self._background: set[str] = set()  # run ids; only while no others run
        self._request_stats = RequestStats(time.monotonic)
        self._faults = 0
        self._round_started_at = time.monotonic()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and the target does not keep failing."""
        return self._thread.is_alive() and self._faults < _MAX_FAULTS

    def round_age_s(self) -> float:
        """Return the seconds since the current round started; 0 without open streams."""
        return time.monotonic() - self._round_started_at if len(self._streams) else 0.0

    def submit(self, request: GenerationRequest, deliver: Deliver, *, whole: bool = False) -> None:
        """Queue a request; ``deliver`` gets its chunks, the last with a finish reason.

        The chunks of a ``whole`` answer are merged, see StreamBatcher. If the loop is not
        healthy, the request is refused at once, on the caller's thread.
        """
        if not self.healthy:
            deliver(_final_chunk(FINISH_REFUSED))
            return
        arrived_at = time.monotonic()
        self._commands.put(lambda: self._add(request, deliver, arrived_at, whole=whole))

    def abort(self, request_id: str) -> None:
        """Drop a request by its ``run_id``; nothing more is delivered."""
        self._commands.put(lambda: self._abort(request_id))

    def update(self, update: Update) -> None:
        """Queue a weight update; it is applied between two rounds."""
        self._engine.updates.put(update)
        self._commands.put(None)  # wakes the thread

    def reset_prefix_cache(self) -> None:
        """Queue the emptying of the prefix cache; requests submitted after it find nothing."""
        self._commands.put(self._engine.reset_prefix_cache)

    def load(self) -> tuple[int, int]:
        """Return the (running, waiting) requests, without background ones."""
        if self._background:  # there are no others then
            return 0, 0
        return self._engine.num_running, self._engine.num_waiting

    def stats(self) -> EngineStats:
        """Return the present state and the totals since the start."""
        running, waiting = self.load()
        blocks, available = self._engine.kv_blocks
        chosen, predicted = self._engine.draft_runner.current_choice()
        return EngineStats(
            running=running,
            waiting=waiting,
            kv_blocks=blocks,
            kv_blocks_available=available,
            preemptions=self._engine.preemptions,
            prefix_cache=self._engine.prefix_cache,
            draft_failures=self._engine.draft_failures,
            drafts=self._engine.drafts(),
            chosen=chosen,
            predicted_goodput=predicted,
            rounds=self._engine.draft_runner.round_stats,
            requests=self._request_stats,
        )

    def close(self) -> None:
        """Stop the thread after the current round, once it has handed over all records."""
        self._closed = True
        self._commands.put(None)
        self._thread.join(timeout=10)

    def _add(
        self, request: GenerationRequest, deliver: Deliver, arrived_at: float, *, whole: bool
    ) -> None:
        self._streams.open(request.run_id, deliver, whole=whole)
        if not request.background:
            self._stop_background()
        elif set(self._streams.names) - self._background - {request.run_id}:
            self._streams.put(request.run_id, _final_chunk(FINISH_YIELDED))
            return
        try:
            self._engine.add(request)
        except GrammarError:
            self._streams.put(request.run_id, _final_chunk(FINISH_GRAMMAR))
            return
        except Exception:
            logger.exception("request %s was refused", request.request_id)
            self._streams.put(request.run_id, _final_chunk(FINISH_ERROR))
            return
        if request.background:
            self._background.add(request.run_id)
        else:
            self._request_stats.on_arrival(request, arrived_at)

    def _stop_background(self) -> None:
        """Finish background requests as yielded."""
        for run_id in list(self._background):
            self._streams.put(run_id, _final_chunk(FINISH_YIELDED))
            self._abort(run_id)

    def _abort(self, request_id: str) -> None:
        self._background.discard(request_id)
        self._streams.close(request_id)
        self._request_stats.on_abort(request_id)
        self._engine.abort(request_id)

    def _run_commands(self, wait_s: float | None) -> None:
        """Run the queued commands; wait so long for the first, None: for ever."""
        try:
            while True:
                command = self._commands.get(wait_s != 0.0, wait_s)
                self._round_started_at = time.monotonic()
                wait_s = 0.0
                if command is not None:
                    command()
        except queue.Empty:
            return

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        while not self._closed:
            self._run_commands(self._wait_s())
            self._round_started_at = time.monotonic()
            self._hand_over()
            if self._closed or not self._engine.has_work:
                self._report()
                continue
            self._report()
            try:
                outputs = self._engine.step()
                self._faults = 0
            except Exception:
                self._faults += 1
                logger.exception("the target failed; all requests end with an error")
                outputs = self._fail_all()
            self._request_stats.on_admitted(self._engine.admitted, self._round_started_at)
            for output in outputs:
                self._deliver(output)
            self._streams.flush()
            if not self._engine.has_work:
                self._report()
        while self._held_records:
            self._hand_over_oldest()

    def _wait_s(self) -> float | None:
        """Seconds that the thread may wait for a command; None if there is nothing else to do."""
        if self._engine.has_work:
            return 0.0
        return self._record_due_in_s() if self._held_records else None

    def _record_due_in_s(self) -> float:
        return self._held_records.due_in_s(time.monotonic(), busy=self.load() != (0, 0))

    def _hand_over(self) -> None:
        """Hand over one record if it is due: a request that arrives waits for no more."""
        if self._record_due_in_s() <= 0.0:
            self._hand_over_oldest()

    def _hand_over_oldest(self) -> None:
        if self._on_record is not None:
            self._held_records.hand_over(self._on_record, time.monotonic())

    def _fail_all(self) -> list[StepOutput]:
        """End every request, including those that the failed round removed from the engine."""
        outputs = self._engine.fail_all()
        known = {output.request_id for output in outputs}
        fault = _final_chunk(FINISH_FAULT)
        return outputs + [
            StepOutput(name, fault) for name in self._streams.names if name not in known
        ]

    def _report(self) -> None:
        if self._on_load is not None:
            self._on_load(*self.load())

    def _deliver(self, output: StepOutput) -> None:
        chunk = output.chunk
        finished = chunk.finish_reason is not None
        tokens = len(chunk.token_ids) + chunk.num_cut_tokens
        self._request_stats.on_output(output.request_id, tokens, chunk.finish_reason)
        if finished:
            self._background.discard(output.request_id)
        if finished or chunk.token_ids or chunk.text:
            self._streams.put(output.request_id, chunk)
        if output.record is not None and self._on_record is not None:
            self._held_records.add(output.record, time.monotonic())
        if output.outcome is not None and self._on_outcome is not None:
            self._on_outcome(output.outcome)


def _final_chunk(reason: str) -> GenerationChunk:
    return GenerationChunk(text="", token_ids=(), finish_reason=reason)
