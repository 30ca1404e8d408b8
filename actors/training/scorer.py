"""The scorer: scores every expert on sampled requests, in the trainer's process."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.actors.atomic_file import replace_text
from paceline.actors.handles import RemoteMethod, remote_method
from paceline.actors.replay.purges import Purges
from paceline.actors.replay.record import RecordError, belongs, decode
from paceline.actors.router.hedge import Hedge, HedgeTable
from paceline.actors.router.key_scope import may_draft
from paceline.actors.training.background import BackgroundLoop
from paceline.actors.training.progress import Stopped, wait_for_permit
from paceline.actors.training.settings import ScorerSettings

if TYPE_CHECKING:
    from paceline.actors.training.client import TrainerClient
    from paceline.actors.training.expert_evaluation import ExpertEvaluator
    from paceline.actors.training.permits import PermitHandle
    from paceline.actors.weights.flat_weights import FlatWeights
    from paceline.actors.weights.subscriber import RegistryHandle

logger = logging.getLogger(__name__)

_AT_ONCE = 16  # records of a call: as many are scored again if one of them is removed
_REFRESH_S = 3.0  # routing reads the table as often; a permit may be hours away


class _Outdated(Exception):  # noqa: N818 - not an error: scoring starts over
    """A record that is being scored has expired or was deleted, or the expert's weights changed."""


class _Encoded(NamedTuple):
    topic: str
    created: float
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerTable(HedgeTable):
    """The routing table, and counts of the scorer.

    Attributes:
        waiting: records that some expert is still to be scored on.
        on_trial: experts with a candidate that live requests are to evaluate.
        offered: records since the start, as the next ones.
        refused: of these.
        scores: of an expert on a record.
        failures: of the scorer's thread.
    """

    waiting: int
    on_trial: tuple[str, ...]
    offered: int
    refused: int
    scores: int
    failures: int = 0


class ScoringLoop:
    """The scorer without its thread and actor: call :meth:`run_once` for ever.

    Records are kept encoded after they have been scored: a new version of an expert is scored on
    the last ones at once, without new requests. :meth:`offer`, :meth:`delete` and :meth:`table` may
    be called from any thread while another one is in :meth:`run_once`.
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
            stopped: whether to end; read at every wait.
        """
        self.hedge = Hedge(settings.draft_paths, settings.hedge)
        self._settings = settings
        self._fingerprints = dict(settings.fingerprints)
        self._clock = clock
        self._sleep = sleep
        self._stopped = stopped
        self._lock = threading.Lock()
        self._records: OrderedDict[str, _Encoded] = OrderedDict()  # by request_id
        self._bytes = 0
        self._scored: dict[str, set[str]] = {expert: set() for expert in settings.draft_paths}
        self._resting: dict[str, float] = {}
        self._on_trial: list[str] = []
        self._refreshed_at = -math.inf  # unix seconds
        self._in_progress: dict[str, _Encoded] = {}  # records that are being scored
        self._removed = False  # any of these
        self._purges = Purges(clock)
        self._counts: Counter[str] = Counter(offered=0, refused=0, scores=0)

    def add_expert(self, expert: str, like: str) -> bool:
        """Add an expert and its topic, at the prior; False if it is known.

        Args:
            expert: its name.
            like: the expert with the same initial weights.
        """
        with self._lock:
            if expert in self._scored or like not in self._scored:
                return False
            self._fingerprints[expert] = self._fingerprints.get(like, "")
            self.hedge.add_expert(expert)
            self._scored[expert] = set()
            return True

    def offer(self, data: bytes) -> None:
        """Take an encoded record; broken and purged ones, and of unknown topics, are refused."""
        try:
            record = decode(data)
        except RecordError as error:
            self._counts["refused"] += 1
            logger.warning("a record was refused: %s", error)
            return
        self._counts["offered"] += 1
        key = record.request_id
        with self._lock:
            known = record.topic in self._scored and key not in self._records
            if not known or self._purges.cover(key, record.topic, record.created):
                self._counts["refused"] += 1
                return
            for old in self.hedge.add_row(record.topic, key):
                self._remove(old)
            self._records[key] = _Encoded(record.topic, record.created, bytes(data))
            self._bytes += len(data)
            while self._bytes > self._settings.capacity_bytes:
                self._remove(next(iter(self._records)))

    def delete(self, request_id: str | None, topic: str | None = None) -> int:
        """Delete an answer's records and rows, or with None all; returns the number of records.

        Args:
            request_id: of the answer, see :func:`paceline.actors.replay.record.belongs`.
            topic: of the records; None is all topics.
        """

        def matches(own: str, key: str) -> bool:
            return topic in (None, own) and belongs(key, request_id)

        with self._lock:
            self._purges.add(request_id, topic)
            gone = [key for key, r in self._records.items() if matches(r.topic, key)]
            self._removed |= any(matches(r.topic, key) for key, r in self._in_progress.items())
            for key in gone:
                self._remove(key)
            self.hedge.remove_rows(matches)  # also of records that have left
            return len(gone)

    def table(self) -> ScorerTable:
        """The routing table, and counts."""
        with self._lock:
            waiting = len({key for expert in self._scored for key in self._missing(expert)})
            table = self.hedge.table()
            return ScorerTable(
                weights=table.weights,
                acceptance=table.acceptance,
                rows=table.rows,
                versions=table.versions,
                waiting=waiting,
                on_trial=tuple(self._on_trial),
                **self._counts,
            )

    def export(self) -> dict[str, object]:
        """The state without records, for JSON."""
        with self._lock:
            return {"fingerprints": dict(self._fingerprints), "hedge": self.hedge.export()}

    def restore(self, data: Any) -> None:
        """Load a state of :meth:`export`, without the gains of drafts that have changed.

        Raises:
            ValueError: ``data`` is no such state.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("fingerprints"), Mapping):
            raise ValueError("scorer: no state")
        with self._lock:
            self.hedge.restore(data.get("hedge"))
            for expert, fingerprint in self._fingerprints.items():
                if data["fingerprints"].get(expert) != fingerprint:
                    self.hedge.set_version(expert, -1)
                    self.hedge.set_version(expert, 0)

    def run_once(self, client: TrainerClient, evaluator: ExpertEvaluator) -> bool:
        """Score one expert on the records that it lacks; False if there was nothing to do.

        Raises:
            Stopped: ``stopped`` returns True.
        """
        with self._lock:
            self._expire()  # first: whatever is down, no record is kept past its retention
        if self._refresh(client) is None:
            return False
        with self._lock:
            expert = self._next()
        if expert is None:
            return False
        try:
            self._wait_for_permit(client, expert)  # weights and records may change meanwhile
        except _Outdated:
            return True
        newest = client.weights(expert)
        if newest is None:  # the others go on
            self._resting[expert] = self._clock() + self._settings.rest_s
            return True
        version, flat = newest
        with self._lock:
            self._follow(expert, version)
            missing = dict(islice(self._missing(expert).items(), _AT_ONCE))
            self._in_progress = missing
        if not missing:  # all have expired meanwhile
            return True
        try:
            self._score(expert, flat, missing, client, evaluator)
        except Stopped:
            raise
        except _Outdated:
            logger.info("%s: records or weights changed while it was scored", expert)
        except Exception:
            # the others go on, and this one is tried again later
            logger.warning("%s could not be scored", expert, exc_info=True)
            self._resting[expert] = self._clock() + self._settings.rest_s
        finally:
            with self._lock:
                self._in_progress, self._removed = {}, False
        return True

    def _refresh(self, client: TrainerClient) -> set[str] | None:
        """Follow the registry; experts with other weights, None if it does not answer."""
        versions, live = client.versions(), client.topic_status()
        self._refreshed_at = self._clock()
        if versions is None or live is None:
            return None
        self._on_trial = [e for e, status in live.items() if status.candidate is not None]
        with self._lock:
            return {name for name, version in versions.items() if self._follow(name, version)}

    def _wait_for_permit(self, client: TrainerClient, expert: str) -> None:
        """Wait for the permit of a forward; records expire and trials end meanwhile.

        Raises:
            _Outdated: a record in progress has expired or was deleted, or the expert's weights
                have changed: drop what is in progress.
        """

        def acquire() -> bool:
            with self._lock:
                self._expire()
                if self._removed:
                    raise _Outdated
            return client.acquire_permit()

        def until_idle() -> None:
            client.until_idle()
            if self._clock() - self._refreshed_at < _REFRESH_S:
                return
            if expert in (self._refresh(client) or ()):
                raise _Outdated

        wait_for_permit(
            acquire,
            until_idle,
            self._settings.poll_s,
            sleep=self._sleep,
            stopped=self._stopped,
        )

    def _score(
        self,
        expert: str,
        flat: FlatWeights | None,
        missing: Mapping[str, _Encoded],
        client: TrainerClient,
        evaluator: ExpertEvaluator,
    ) -> None:
        records = [decode(record.data) for record in missing.values()]
        gains = evaluator.score(
            expert, flat, records, lambda: self._wait_for_permit(client, expert)
        )
        with self._lock:
            for (key, record), gain in zip(missing.items(), gains, strict=True):
                if key in self._records:
                    self._scored[expert].add(key)
                self.hedge.add_gain(record.topic, key, expert, gain)
            self._counts["scores"] += len(gains)

    def _follow(self, expert: str, version: int) -> bool:
        """Follow an expert's version; whether it has changed."""
        changed = self.hedge.set_version(expert, version)
        if changed:
            self._scored[expert].clear()
            self._resting.pop(expert, None)
        return changed

    def _next(self) -> str | None:
        """The expert that lacks most scores, of those that do not rest."""
        now = self._clock()
        lacking = {
            expert: len(self._missing(expert))
            for expert in self._scored
            if self._resting.get(expert, 0.0) <= now
        }
        most = max(lacking.values(), default=0)
        return next((e for e, count in lacking.items() if count == most), None) if most else None

    def _missing(self, expert: str) -> dict[str, _Encoded]:
        """The records that an expert is still to be scored on."""
        done = self._scored[expert]
        return {
            key: record
            for key, record in self._records.items()
            if key not in done and may_draft(expert, record.topic)
        }

    def _expire(self) -> None:
        oldest = self._clock() - self._settings.retention_s
        for key in [key for key, record in self._records.items() if record.created < oldest]:
            self._remove(key)
        self._removed |= any(record.created < oldest for record in self._in_progress.values())

    def _remove(self, key: str) -> None:
        """Remove a record; its gains stay."""
        record = self._records.pop(key, None)
        if record is not None:
            self._bytes -= len(record.data)
            for done in self._scored.values():
                done.discard(key)


class Scorer:
    """Scores in a thread of its own, from construction to death, while serving is idle.

    Killed at any moment and restarted, it goes on from the gains on disk; its records are lost, and
    new requests bring others.
    """

    def __init__(
        self,
        settings: ScorerSettings,
        evaluator: ExpertEvaluator,
        registry: RegistryHandle,
        scheduler: PermitHandle | None,
    ) -> None:
        """Start scoring.

        Args:
            settings: see ScorerSettings.
            evaluator: of the experts; used by this thread alone from now on.
            registry: actor handle of the WeightRegistry.
            scheduler: actor handle of the TrainerScheduler; None always grants permits.
        """
        self._settings = settings
        self._evaluator = evaluator
        self._handles = (registry, scheduler)
        self._file = None if settings.state_file is None else Path(settings.state_file)
        self._background = BackgroundLoop(
            "paceline-scorer", self._prepare, settings.refresh_s, low_priority=settings.low_priority
        )
        stopping = self._background.stopping
        self._scoring = ScoringLoop(settings, sleep=stopping.wait, stopped=stopping.is_set)
        self._restore()
        self._saving = threading.Lock()
        self._background.start()

    def offer(self, data: bytes) -> None:
        """Take an encoded record of a finished request."""
        self._scoring.offer(data)

    def table(self) -> ScorerTable:
        """See ScoringLoop, with the failures of its thread."""
        return replace(self._scoring.table(), failures=self._background.failures)

    def delete(self, request_id: str | None, topic: str | None = None) -> int:
        """See ScoringLoop; from the state on disk too: the thread may wait for hours."""
        removed = self._scoring.delete(request_id, topic)
        self._save()
        return removed

    def stop(self) -> None:
        """End the thread within a forward."""
        self._background.stop(self._settings.timeout_s)

    def _prepare(self) -> Callable[[], bool]:
        from paceline.actors.training.client import RayTrainerClient

        client = RayTrainerClient({}, *self._handles, self._settings.timeout_s)

        def run_once() -> bool:
            for expert, like in client.added_topics().items():
                if self._scoring.add_expert(expert, like):
                    self._evaluator.add_expert(expert, like)
            worked = self._scoring.run_once(client, self._evaluator)
            if worked:
                self._save()
            return worked

        return run_once

    def _save(self) -> None:
        """Replace the state on disk atomically."""
        if self._file is None:
            return
        with self._saving:
            text = json.dumps(self._scoring.export())
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                replace_text(self._file, text)
            except OSError:
                logger.warning("the routing table was not saved", exc_info=True)

    def _restore(self) -> None:
        if self._file is None or not self._file.is_file():
            return
        try:
            self._scoring.restore(json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            logger.warning("the routing table on disk cannot be read, starting fresh")


class ScorerHandle:
    """Handle of the actor that has a Scorer: the first trainer's, which may run without."""

    offer = remote_method(Scorer.offer)
    delete = remote_method(Scorer.delete)
    table: RemoteMethod[[], ScorerTable | None]
