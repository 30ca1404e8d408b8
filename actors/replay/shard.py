"""The replay shard: the actor that keeps one topic's records."""

from __future__ import annotations

import logging
import math
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.actors.replay.partition import Entry
from paceline.actors.replay.record import (
    RecordError,
    RecordValueError,
    decode,
    is_held_out,
    is_synthetic,
    source_id,
)
from paceline.actors.replay.table import ReplaySettings, ReplayTable, Split, rewrite_due

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<I")


class Journal:
    """Append-only, rewritten whole when records must go.

    A record reaches the kernel with every append, so that it survives the death of the
    process, not of the machine.
    """

    def __init__(self, path: str | Path) -> None:
        """Open or make the file; what a killed rewriting left goes."""
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = self._path.with_name(f".{self._path.name}.partial")
        self._partial.unlink(missing_ok=True)
        self._file = self._path.open("ab")

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._file.tell()

    def read(self) -> Iterator[bytes]:
        """All whole records; what follows a torn one is left out."""
        with self._path.open("rb") as file:
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                (length,) = _HEADER.unpack(header)
                data = file.read(length)
                if len(data) < length:
                    break
                yield data

    def append(self, data: bytes) -> None:
        """Add a record."""
        self._file.write(_HEADER.pack(len(data)) + data)
        self._file.flush()

    def rewrite(self, records: Iterable[bytes]) -> None:
        """Replace everything, atomically."""
        with self._partial.open("wb") as file:
            for data in records:
                file.write(_HEADER.pack(len(data)) + data)
        self._file.close()
        self._partial.replace(self._path)
        self._file = self._path.open("ab")


class ReplayShard:
    """Records of one topic, all splits.

    With a ``persist_dir`` they also lie in a file there and survive the actor's death; without
    one they live in memory alone and a killed shard starts empty. A thread drops what is past
    retention while nobody calls.
    """

    def __init__(
        self,
        topic: str,
        settings: ReplaySettings | None = None,
        persist_dir: str | None = None,
        *,
        seed: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Come back with the persisted records, if any.

        Args:
            topic: whose records these are.
            settings: capacity, retention, split.
            persist_dir: folder for ``<topic>.records``.
            seed: of sampling; None is unseeded.
            clock: unix seconds.
        """
        self._topic = topic
        self._settings = settings or ReplaySettings()
        self._table = ReplayTable(self._settings)
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self._refused = self._refused_values = self._left_out = 0
        self._lock = threading.RLock()  # the calls come from one thread, expiry from another
        self._oldest_written = math.inf
        self._journal: Journal | None = None
        if persist_dir is not None:
            self._journal = Journal(Path(persist_dir) / f"{topic}.records")
            for data in self._journal.read():
                self._keep(data)
            self._compact()
        _expire_now_and_then(weakref.ref(self), self._settings.disk_slack_s / 2)

    def insert(self, data: bytes, left_out: int = 0) -> None:
        """Take an encoded record; bytes that are none are counted and dropped.

        A synthetic record is dropped if its source is gone, purged perhaps.

        Args:
            data: the record.
            left_out: requests of the topic since the last record, of which there is none because
                there were so many: traffic, though nothing to learn from.
        """
        with self._lock:
            self._left_out += left_out
            entry = self._keep(data, alone=False)
            if entry is not None and self._journal is not None:
                self._journal.append(data)
                self._oldest_written = min(self._oldest_written, entry.created)
                if self._journal.size > 2 * self._settings.capacity_bytes:
                    self._compact()
            self._rewrite_when_due()

    def sample(self, n: int, split: Split) -> list[bytes]:
        """At most ``n`` different encoded records of a split, as the settings' sampler draws."""
        with self._lock:
            return self._table.sample(n, split, self._clock(), self._rng)

    def update_losses(self, losses: dict[str, float]) -> None:
        """Note how badly a draft in training did on records, in nats, by request id.

        They order what is drawn and removed by priority. They are not persisted: a shard that
        comes back takes every record for unknown.
        """
        with self._lock:
            self._table.update_losses(losses)

    def delete(self, request_id: str | None) -> int:
        """Drop a request's records, or with None all, from memory and disk; returns how many."""
        with self._lock:
            removed = self._table.delete(request_id)
            self._compact()
            return removed

    def expire(self) -> None:
        """Drop what is past retention, and from disk where it has been there for too long."""
        with self._lock:
            self._table.expire(self._clock())
            self._rewrite_when_due()

    def stats(self) -> dict[str, Any]:
        """Topic, counts per split, bytes; inserts, refusals and what was left out since the start.

        ``refused_values_total`` of ``refused_total`` had impossible numbers in them.
        """
        with self._lock:
            counts = self._table.stats(self._clock())
        refused = {
            "refused_total": self._refused,
            "refused_values_total": self._refused_values,
            "left_out_total": self._left_out,
        }
        return {"topic": self._topic, **counts, **refused}

    def ping(self) -> bool:
        """True: the actor answers."""
        return True

    def _keep(self, data: bytes, *, alone: bool = True) -> Entry | None:
        """Put a record into the table; None where it is none, past retention, or not to be kept.

        Args:
            data: encoded.
            alone: whether a synthetic one may be here without its source.
        """
        try:
            record = decode(data)
        except RecordError as error:
            self._refused += 1
            self._refused_values += isinstance(error, RecordValueError)
            logger.warning("%s: %s", self._topic, error)
            return None
        held_out = is_held_out(record.prompt_token_ids, self._settings.held_out_fraction)
        entry = Entry(record.request_id, record.created, bytes(data))
        split: Split = "held_out" if held_out else "train"
        if is_synthetic(record.request_id):
            if held_out:  # a prompt that judges must not be learnt, whoever comes up with it
                return None
            if not (alone or self._table.has(source_id(record.request_id))):
                return None
            split = "synthetic"
        return entry if self._table.insert(entry, split, self._clock()) else None

    def _rewrite_when_due(self) -> None:
        if rewrite_due(self._oldest_written, self._clock(), self._settings):
            self._table.expire(self._clock())
            self._compact()

    def _compact(self) -> None:
        """Have the file hold what the table holds, and nothing else."""
        if self._journal is not None:
            entries = [entry for _, entry in self._table.entries()]
            self._journal.rewrite(entry.data for entry in entries)
            self._oldest_written = min((e.created for e in entries), default=math.inf)


def _expire_now_and_then(reference: weakref.ref[ReplayShard], every_s: float) -> None:
    """Call ``expire`` for as long as the shard lives, in a thread of its own."""
    ended = threading.Event()
    shard = reference()
    assert shard is not None
    weakref.finalize(shard, ended.set)

    def run() -> None:
        while not ended.wait(every_s):
            if (shard := reference()) is None:
                return
            try:
                shard.expire()
            except Exception:
                logger.warning("records past retention could not be dropped", exc_info=True)
            del shard

    threading.Thread(target=run, name="paceline-expiry", daemon=True).start()
