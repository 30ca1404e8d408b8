"""The engine's own thread: takes requests from any thread, hands their chunks back."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline.actors.decoding.engine import Engine, StepOutput
from paceline.actors.decoding.meter import EngineFigures, RequestMeter
from paceline.actors.decoding.outbox import Deliver, Outbox
from paceline.actors.decoding.request import (
    FINISH_ERROR,
    FINISH_FAULT,
    FINISH_REFUSED,
    FINISH_YIELDED,
    GenerationChunk,
    GenerationRequest,
)
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.weights.evidence import DraftOutcome

logger = logging.getLogger(__name__)

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

    def swap(self, expert: str, weight_version: int, state: Mapping[str, Tensor] | None) -> None:
        """Queue new weights of a slot, None to empty a candidate's."""
        self._inbox.put(lambda: self._engine.swap(expert, weight_version, state))

    def enlist(self, expert: str, like: str) -> None:
        """Queue a further expert, a copy of another's initial weights."""
        self._inbox.put(lambda: self._engine.enlist(expert, like))

    def limit_drafting(self, max_tokens: int | None, probe_share: float | None) -> None:
        """Queue other limits of the controller, see GoodputController."""
        self._inbox.put(lambda: self._engine.drafting.limit(max_tokens, probe_share))

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
        chosen, predicted = self._engine.drafting.chosen()
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
            rounds=self._engine.drafting.meter,
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
