"""The scorer: the part of the trainer's process that measures which expert suits a topic."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.actors.replay.record import RecordError, ReplayRecord, belongs, decode
from paceline.actors.router.hedge import Hedge
from paceline.actors.training.backoff import Patience
from paceline.actors.training.progress import Stopped
from paceline.actors.training.settings import ScorerSettings

if TYPE_CHECKING:
    from paceline.actors.weights.flat_weights import FlatWeights

logger = logging.getLogger(__name__)

_AT_ONCE = 16  # records of a tick: as many are scored again where one of them is withdrawn


class ServedWeights(Protocol):
    """What scoring sees of the rest; answers empty-handed rather than raise."""

    def may_train(self) -> bool:
        """Leave for one forward."""

    def versions(self) -> dict[str, int] | None:
        """Expert to served weight_version; None where the registry does not answer."""

    def live(self) -> dict[str, dict[str, Any]] | None:
        """See WeightRegistry.live; None where the registry does not answer."""

    def weights(self, topic: str) -> tuple[int, FlatWeights | None] | None:
        """The served weight_version and its weights, see World."""


class Judge(Protocol):
    """Runs an expert over records."""

    def enlist(self, expert: str, like: str) -> None:
        """Take a further expert with the initial weights of another one."""

    def score(
        self,
        expert: str,
        flat: FlatWeights | None,
        records: Sequence[ReplayRecord],
        before_batch: Callable[[], None],
    ) -> list[float]:
        """Acceptance of every record, nan where it cannot be had. None are initial weights."""


class _Withdrawn(Exception):  # noqa: N818 - not an error: scoring starts over
    """A record that is being scored has expired or was deleted."""


class Scoring:
    """The scorer's state and work without thread and actor around it.

    Records wait here encoded, and stay when they have been scored: a new version of an expert is
    scored on the last ones at once, instead of waiting for new requests. :meth:`offer` and
    :meth:`table` may be called from any thread while another one is in :meth:`tick`.
    """

    def __init__(
        self,
        settings: ScorerSettings,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start without records, at the prior.

        Args:
            settings: see ScorerSettings.
            clock: unix seconds, as in the records.
            sleep: waits some seconds.
            stopped: whether to end; looked at wherever scoring waits.
        """
        self.hedge = Hedge(settings.draft_paths, settings.hedge)
        self._settings = settings
        self._marks = dict(settings.marks)
        self._clock = clock
        self._patience = Patience(settings.poll_s, sleep=sleep, stopped=stopped)
        self._lock = threading.Lock()
        self._records: OrderedDict[str, tuple[str, float, bytes]] = OrderedDict()
        self._bytes = 0
        self._scored: dict[str, set[str]] = {expert: set() for expert in settings.draft_paths}
        self._resting: dict[str, float] = {}
        self._on_trial: list[str] = []
        self._in_hand: dict[str, tuple[str, float]] = {}  # topic and time of what is being scored
        self._withdrawn = False  # any of that
        self._counts: Counter[str] = Counter(offered=0, refused=0, scores=0)

    def enlist(self, expert: str, like: str) -> bool:
        """Take a further expert and its topic, at the prior; whether it was unknown.

        Args:
            expert: its name.
            like: the expert whose initial weights are its own.
        """
        with self._lock:
            if expert in self._scored or like not in self._scored:
                return False
            self._marks[expert] = self._marks.get(like, "")
            self.hedge.enlist(expert)
            self._scored[expert] = set()
            return True

    def offer(self, data: bytes) -> None:
        """Take an encoded record; one that is none, or of no known topic, is counted."""
        try:
            record = decode(data)
        except RecordError as error:
            self._counts["refused"] += 1
            logger.warning("a record was not taken: %s", error)
            return
        self._counts["offered"] += 1
        key = record.request_id
        with self._lock:
            if record.topic not in self._scored or key in self._records:
                self._counts["refused"] += 1
                return
            for old in self.hedge.open(record.topic, key):
                self._let_go(old)
            self._records[key] = (record.topic, record.created, bytes(data))
            self._bytes += len(data)
            while self._bytes > self._settings.capacity_bytes:
                self._let_go(next(iter(self._records)))

    def delete(self, request_id: str | None, topic: str | None = None) -> int:
        """Drop an answer's records and their rows, or with None all; returns how many.

        Args:
            request_id: of the answer, see :func:`paceline.actors.replay.record.belongs`.
            topic: whose records alone are meant; None is all topics.
        """
        with self._lock:
            gone = [
                (key, own)
                for key, (own, _, _) in self._records.items()
                if (request_id is None or belongs(key, request_id)) and topic in (None, own)
            ]
            for key, own in self._in_hand.items():
                asked = request_id is None or belongs(key, request_id)
                self._withdrawn |= asked and topic in (None, own[0])
            for key, topic in gone:
                self._let_go(key)
                self.hedge.drop(topic, key)
            return len(gone)

    def table(self) -> dict[str, Any]:
        """See Hedge.table; ``waiting`` are records that some expert is still to be scored on.

        ``on_trial`` names the experts with a candidate that live requests are to judge.
        """
        with self._lock:
            waiting = sum(
                any(key not in done for done in self._scored.values()) for key in self._records
            )
            own = {"waiting": waiting, "on_trial": self._on_trial}
            return self.hedge.table() | own | self._counts

    def export(self) -> dict[str, Any]:
        """The state without records, as plain data."""
        with self._lock:
            return {"marks": dict(self._marks), "hedge": self.hedge.export()}

    def restore(self, data: Any) -> None:
        """Take what :meth:`export` gave; gains of drafts that are others now are left out.

        Raises:
            ValueError: for what is no such state.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("marks"), Mapping):
            raise ValueError("scorer: no state")
        with self._lock:
            self.hedge.restore(data.get("hedge"))
            for expert, mark in self._marks.items():
                if data["marks"].get(expert) != mark:
                    self.hedge.serve(expert, -1)
                    self.hedge.serve(expert, 0)

    def tick(self, world: ServedWeights, judge: Judge) -> bool:
        """Score one expert on what it lacks; False where there was nothing to do.

        Raises:
            Stopped: when told to end.
        """
        with self._lock:
            self._expire()  # whatever else is down: nothing is kept past its retention
        versions, live = world.versions(), world.live()
        if versions is None or live is None:
            return False
        self._on_trial = [e for e, facts in live.items() if facts.get("candidate") is not None]
        with self._lock:
            for name, version in versions.items():
                self._follow(name, version)
            expert = self._next()
        if expert is None:
            return False
        self._patience.until(lambda: self._may_score(world))  # weights and records may change
        newest = world.weights(expert)
        if newest is None:
            return False
        version, flat = newest
        with self._lock:
            self._follow(expert, version)
            missing = dict(islice(self._missing(expert).items(), _AT_ONCE))
            self._in_hand = {key: entry[:2] for key, entry in missing.items()}
        if not missing:  # all that there was has expired meanwhile
            return True
        try:
            self._score(expert, flat, missing, world, judge)
        except Stopped:
            raise
        except _Withdrawn:
            logger.info("%s: a record was withdrawn while it was scored", expert)
        except Exception:
            # the others go on, and this one is tried again later
            logger.warning("%s could not be scored", expert, exc_info=True)
            self._resting[expert] = self._clock() + self._settings.rest_s
        finally:
            with self._lock:
                self._in_hand, self._withdrawn = {}, False
        return True

    def _may_score(self, world: ServedWeights) -> bool:
        """Leave for a forward; however long it takes, records expire meanwhile.

        Raises:
            _Withdrawn: one in hand has expired or was deleted: let go of all that are.
        """
        with self._lock:
            self._expire()
            if self._withdrawn:
                raise _Withdrawn
        return world.may_train()

    def _score(
        self,
        expert: str,
        flat: FlatWeights | None,
        missing: Mapping[str, tuple[str, float, bytes]],
        world: ServedWeights,
        judge: Judge,
    ) -> None:
        records = [decode(data) for _, _, data in missing.values()]
        gains = judge.score(
            expert,
            flat,
            records,
            lambda: self._patience.until(lambda: self._may_score(world)),
        )
        with self._lock:
            for (key, (topic, _, _)), gain in zip(missing.items(), gains, strict=True):
                if key in self._records:
                    self._scored[expert].add(key)
                self.hedge.note(topic, key, expert, gain)
            self._counts["scores"] += len(gains)

    def _follow(self, expert: str, version: int) -> None:
        if self.hedge.serve(expert, version):
            self._scored[expert].clear()
            self._resting.pop(expert, None)

    def _next(self) -> str | None:
        """The expert that lacks most scores; those that rest do not count."""
        now = self._clock()
        lacking = {
            expert: len(self._missing(expert))
            for expert in self._scored
            if self._resting.get(expert, 0.0) <= now
        }
        most = max(lacking.values(), default=0)
        return next((e for e, count in lacking.items() if count == most), None) if most else None

    def _missing(self, expert: str) -> dict[str, tuple[str, float, bytes]]:
        done = self._scored[expert]
        return {key: entry for key, entry in self._records.items() if key not in done}

    def _expire(self) -> None:
        oldest = self._clock() - self._settings.retention_s
        for key in [key for key, (_, created, _) in self._records.items() if created < oldest]:
            self._let_go(key)
        self._withdrawn |= any(created < oldest for _, created in self._in_hand.values())

    def _let_go(self, key: str) -> None:
        """Forget a record; its gains stay."""
        entry = self._records.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry[2])
            for done in self._scored.values():
                done.discard(key)


_RETRY_S = 1.0


class Scorer:
    """Scores in a thread of its own, from construction to death, while serving is idle.

    Killed at any moment and restarted, it goes on from the gains on disk; what records it held
    are gone, and other requests come.
    """

    def __init__(
        self, settings: ScorerSettings, judge: Judge, registry: Any, scheduler: Any
    ) -> None:
        """Start scoring.

        Args:
            settings: see ScorerSettings.
            judge: runs the experts; used by this thread alone from now on.
            registry: actor handle of the WeightRegistry.
            scheduler: actor handle of the TrainerScheduler; None always grants permits.
        """
        self._settings = settings
        self._judge = judge
        self._handles = (registry, scheduler)
        self._stop = threading.Event()
        self._failures = 0
        self._file = None if settings.state_file is None else Path(settings.state_file)
        self._scoring = Scoring(settings, sleep=self._stop.wait, stopped=self._stop.is_set)
        self._restore()
        self._thread = threading.Thread(target=self._run, name="paceline-scorer", daemon=True)
        self._thread.start()

    def offer(self, data: bytes) -> None:
        """Take an encoded record of a finished request."""
        self._scoring.offer(data)

    def table(self) -> dict[str, Any]:
        """Weights and mean acceptance by topic and expert, and counts; see Hedge.table."""
        return self._scoring.table() | {"failures": self._failures}

    def delete(self, request_id: str | None, topic: str | None = None) -> int:
        """See Scoring."""
        return self._scoring.delete(request_id, topic)

    def stop(self) -> None:
        """End the thread within a forward."""
        self._stop.set()
        self._thread.join(self._settings.timeout_s)

    def _run(self) -> None:
        from paceline.actors.training.trainer import lower_priority

        if self._settings.low_priority:
            lower_priority()
        from paceline.actors.training.client import RayWorld

        world = RayWorld({}, *self._handles, self._settings.timeout_s)
        while not self._stop.is_set():
            try:
                self._enlist(world.added())
                if self._scoring.tick(world, self._judge):
                    self._save()
                else:
                    self._stop.wait(self._settings.refresh_s)
            except Stopped:
                return
            except Exception:
                self._failures += 1
                logger.warning("scoring failed, going on", exc_info=True)
                self._stop.wait(_RETRY_S)

    def _enlist(self, added: Mapping[str, str]) -> None:
        for expert, like in added.items():
            if self._scoring.enlist(expert, like):
                self._judge.enlist(expert, like)

    def _save(self) -> None:
        """Replace the state on disk, whole or not at all."""
        if self._file is None:
            return
        partial = self._file.with_name(f".{self._file.name}.{os.getpid()}.partial")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(self._scoring.export()), encoding="utf-8")
            partial.replace(self._file)
        except OSError:
            logger.warning("the routing table was not kept", exc_info=True)

    def _restore(self) -> None:
        if self._file is None or not self._file.is_file():
            return
        try:
            self._scoring.restore(json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            logger.warning("the routing table on disk cannot be read, starting anew")
