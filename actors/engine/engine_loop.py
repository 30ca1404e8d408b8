"""The engine's own thread: takes requests from any thread, hands their chunks back."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.engine.request import (
    FAILED,
    FINISH_ERROR,
    FINISH_FAULT,
    FINISH_REFUSED,
    FINISH_YIELDED,
    GenerationChunk,
    GenerationRequest,
    merge_chunks,
)
from paceline.actors.engine.stats import EngineFigures, RequestMeter
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.speculation.pending_updates import Update
from paceline.actors.weights.draft_outcomes import DraftOutcome

logger = logging.getLogger(__name__)

Deliver = Callable[[GenerationChunk], None]
_LONGEST_S = 0.05  # between two chunks of a stream: twenty a second still look like writing
_WHOLE_S = 1.0  # of an answer that nobody reads before its end


def interval_s(streams: int, chunks_per_s: float) -> float:
    """Seconds between two chunks of one stream: so many a second for all, but twenty for each.

    Args:
        streams: that somebody reads as they come.
        chunks_per_s: for all of them together; 0 sends every round's.
    """
    return min(streams / chunks_per_s, _LONGEST_S) if chunks_per_s else 0.0


@dataclass(slots=True)
class _Stream:
    deliver: Deliver
    whole: bool
    held: list[GenerationChunk] = field(default_factory=list)
    sent_at: float = float("-inf")


class Outbox:
    """Open streams, and what they are to get. The engine's thread alone uses it.

    A stream's first chunk goes out at once, so does its last with all that was held until then.
    """

    def __init__(
        self, chunks_per_s: float, clock: Callable[[], float], lost: Callable[[str], None]
    ) -> None:
        """No stream is open.

        Args:
            chunks_per_s: see :func:`interval_s`.
            clock: monotonic seconds.
            lost: hears of a stream whose ``deliver`` raised; it is closed.
        """
        self._chunks_per_s = chunks_per_s
        self._clock = clock
        self._lost = lost
        self._flushed_at = float("-inf")
        self._round_s = 0.0
        self._streams: dict[str, _Stream] = {}
        self._read = 0  # of these, those that are not whole

    @property
    def names(self) -> list[str]:
        """Of the open streams."""
        return list(self._streams)

    def __len__(self) -> int:
        """Streams that are open; any thread may ask."""
        return len(self._streams)

    def open(self, name: str, deliver: Deliver, *, whole: bool = False) -> None:
        """Take a stream on; ``whole`` ones are handed on once a second and at their end."""
        self.close(name)
        self._streams[name] = _Stream(deliver, whole)
        self._read += not whole

    def close(self, name: str) -> None:
        """Drop a stream and what it has not got; unknown ones are fine."""
        stream = self._streams.pop(name, None)
        self._read -= stream is not None and not stream.whole

    def put(self, name: str, chunk: GenerationChunk) -> None:
        """Hand a chunk on, now or with later ones; one with a finish reason closes its stream."""
        stream = self._streams.get(name)
        if stream is None:
            return
        ended = chunk.finish_reason is not None
        if ended:
            self.close(name)
        if chunk.finish_reason in FAILED and stream.held:
            self._send(name, stream)  # whoever goes on elsewhere has what came before
        stream.held.append(chunk)
        if ended or self._due(stream):
            self._send(name, stream)

    def flush(self) -> None:
        """Send what has been held long enough; call it after every round.

        Between two rounds nothing is sent: a chunk goes at that end of a round which is nearest to
        its time.
        """
        now = self._clock()
        self._round_s, self._flushed_at = now - self._flushed_at, now
        for name, stream in list(self._streams.items()):
            if stream.held and self._due(stream):
                self._send(name, stream)

    def _due(self, stream: _Stream) -> bool:
        least = interval_s(self._read, self._chunks_per_s)
        if stream.whole and self._chunks_per_s:
            least = _WHOLE_S
        early = min(self._round_s, least) / 2
        return self._clock() - stream.sent_at >= least - early

    def _send(self, name: str, stream: _Stream) -> None:
        """Whoever takes nothing any more ends its own request alone."""
        chunk, stream.held, stream.sent_at = merge_chunks(stream.held), [], self._clock()
        try:
            stream.deliver(chunk)
        except Exception:
            logger.warning("nobody takes what request %s gets", name, exc_info=True)
            self.close(name)
            self._lost(name)


_MAX_FAULTS = 5  # in a row; more than one request may cause alone


class EngineLoop:
    """Runs an engine on one thread.

    Every call may come from any thread. ``deliver`` callbacks, ``on_record``, ``on_load`` and
    ``on_outcome`` run on the engine's thread: they must be quick and must not raise.
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
    ) -> None:
        """Start the thread.

        Args:
            engine: used by this thread alone from now on.
            num_threads: torch threads of the forwards; OpenMP counts them per thread.
            on_record: gets the replay record of every finished request that is kept.
            on_load: gets (running, waiting) after every round and once when all is done.
            on_outcome: gets what the draft did for every finished request that tells.
            chunks_per_s: of all streams together, see Outbox; 0 hands every round's on at once.
        """
        self._engine = engine
        self._num_threads = num_threads
        self._on_record = on_record
        self._on_load = on_load
        self._on_outcome = on_outcome
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox = Outbox(chunks_per_s, time.monotonic, self._drop)
        self._background: set[str] = set()  # of these; never beside others
        self._requests = RequestMeter(time.monotonic)
        self._faults = 0
        self._turned_at = time.monotonic()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """False where the thread has ended or the target keeps failing."""
        return self._thread.is_alive() and self._faults < _MAX_FAULTS

    def silent_s(self) -> float:
        """Seconds that the present round has taken so far; 0 where there is nothing to do."""
        return time.monotonic() - self._turned_at if len(self._outbox) else 0.0

    def submit(self, request: GenerationRequest, deliver: Deliver, *, whole: bool = False) -> None:
        """Queue a request; ``deliver`` gets its chunks, the last with a finish reason.

        Those of an answer that is wanted ``whole`` come together, but for one now and then.
        Where the loop is not healthy, it is refused at once, on the caller's thread.
        """
        if not self.healthy:
            deliver(_ended(FINISH_REFUSED))
            return
        came = time.monotonic()
        self._inbox.put(lambda: self._add(request, deliver, came, whole=whole))

    def abort(self, request_id: str) -> None:
        """Drop a request by its ``run_id``; it delivers nothing more."""
        self._inbox.put(lambda: self._drop(request_id))

    def update(self, update: Update) -> None:
        """Queue a weight update; it is applied between two rounds."""
        self._engine.updates.put(update)
        self._inbox.put(None)  # wakes the thread

    def drafts(self) -> dict[str, int]:
        """Every draft with its weight_version."""
        return self._engine.drafts()

    def load(self) -> tuple[int, int]:
        """(running, waiting) requests now, those in the background not counted."""
        if self._background:  # then there are no others
            return 0, 0
        return self._engine.num_running, self._engine.num_waiting

    def figures(self) -> EngineFigures:
        """What the engine is at and has done."""
        running, waiting = self.load()
        blocks, available = self.kv_blocks
        chosen, predicted = self._engine.draft_runner.current_choice()
        return EngineFigures(
            running=running,
            waiting=waiting,
            kv_blocks=blocks,
            kv_blocks_available=available,
            preemptions=self.preemptions,
            draft_failures=self.draft_failures,
            drafts=self.drafts(),
            chosen=chosen,
            predicted_goodput=predicted,
            rounds=self._engine.draft_runner.meter,
            requests=self._requests,
        )

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """(all, available) blocks of the target's key/value memory."""
        return self._engine.kv_blocks

    @property
    def preemptions(self) -> int:
        """How often a request gave up its key/value memory and began anew."""
        return self._engine.preemptions

    @property
    def draft_failures(self) -> int:
        """Rounds that went on without speculation because a draft failed."""
        return self._engine.draft_failures

    def close(self) -> None:
        """End the thread after the round in progress."""
        self._closed = True
        self._inbox.put(None)
        self._thread.join(timeout=10)

    def _add(
        self, request: GenerationRequest, deliver: Deliver, came: float, *, whole: bool
    ) -> None:
        self._outbox.open(request.run_id, deliver, whole=whole)
        if not request.background:
            self._give_way()
        elif set(self._outbox.names) - self._background - {request.run_id}:
            self._outbox.put(request.run_id, _ended(FINISH_YIELDED))
            return
        try:
            self._engine.add(request)
        except Exception:
            logger.exception("request %s was refused", request.request_id)
            self._outbox.put(request.run_id, _ended(FINISH_ERROR))
            return
        if request.background:
            self._background.add(request.run_id)
        else:
            self._requests.came(request, came)

    def _give_way(self) -> None:
        """End what runs in the background: somebody is here."""
        for run_id in list(self._background):
            self._outbox.put(run_id, _ended(FINISH_YIELDED))
            self._drop(run_id)

    def _drop(self, request_id: str) -> None:
        self._background.discard(request_id)
        self._outbox.close(request_id)
        self._requests.dropped(request_id)
        self._engine.abort(request_id)

    def _take(self, *, wait: bool) -> None:
        """Run what has come in; block for the first where there is nothing else to do."""
        try:
            while True:
                command = self._inbox.get(block=wait)
                self._turned_at = time.monotonic()
                wait = False
                if command is not None:
                    command()
        except queue.Empty:
            return

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        while not self._closed:
            self._take(wait=not self._engine.has_work)
            self._turned_at = time.monotonic()
            if self._closed or not self._engine.has_work:
                self._report()
                continue
            self._report()
            try:
                outputs = self._engine.step()
                self._faults = 0
            except Exception:
                self._faults += 1
                logger.exception("the target failed; its running requests end with an error")
                outputs = self._fail_all()
            self._requests.begun(self._engine.admitted, self._turned_at)
            for output in outputs:
                self._hand_out(output)
            self._outbox.flush()
            if not self._engine.has_work:
                self._report()

    def _fail_all(self) -> list[StepOutput]:
        """End every request, also one that the failed round had taken out of the engine."""
        outputs = self._engine.fail_all()
        known = {output.request_id for output in outputs}
        fault = _ended(FINISH_FAULT)
        return outputs + [
            StepOutput(name, fault) for name in self._outbox.names if name not in known
        ]

    def _report(self) -> None:
        if self._on_load is not None:
            self._on_load(*self.load())

    def _hand_out(self, output: StepOutput) -> None:
        chunk = output.chunk
        finished = chunk.finish_reason is not None
        tokens = len(chunk.token_ids) + chunk.num_cut_tokens
        self._requests.gave(output.request_id, tokens, chunk.finish_reason)
        if finished:
            self._background.discard(output.request_id)
        if finished or chunk.token_ids or chunk.text:
            self._outbox.put(output.request_id, chunk)
        if output.record is not None and self._on_record is not None:
            self._on_record(output.record)
        if output.outcome is not None and self._on_outcome is not None:
            self._on_outcome(output.outcome)


def _ended(reason: str) -> GenerationChunk:
    return GenerationChunk(text="", token_ids=(), finish_reason=reason)
