"""The replay shard, which stores one topic's records."""

from __future__ import annotations

import logging
import math
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np

from paceline.actors.handles import remote_method
from paceline.actors.replay.buffer import ReplayBuffer, ReplaySettings, ShardStats, Split
from paceline.actors.replay.purges import Purges
from paceline.actors.replay.record import (
    RecordError,
    RecordValueError,
    belongs,
    decode,
    is_held_out,
    is_synthetic,
    source_id,
)
from paceline.actors.replay.table import EncodedRecord

logger = logging.getLogger(__name__)

FILE_SUFFIX = ".records"
_HEADER = struct.Struct("<I")
_REMEMBERED_SAMPLES = 4096  # of several rounds


def _open_private(path: str, flags: int) -> int:
    """For ``open``: prompts and answers are their owner's to read."""
    return os.open(path, flags, 0o600)


class Journal:
    """Append-only file of records, rewritten whole to remove some.

    Every append reaches the kernel: records survive the death of the process, not of the machine.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._partial = self._path.with_name(f".{self._path.name}.partial")
        self._partial.unlink(missing_ok=True)  # of a rewrite that was killed
        self._file = self._open()

    def _open(self) -> FileIO:
        return FileIO(self._path, "ab", opener=_open_private)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._file.tell()

    def read(self) -> Iterator[bytes]:
        """All records before the first torn one."""
        with self._path.open("rb") as file:
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                (length,) = _HEADER.unpack(header)
                data = file.read(length)
                if len(data) < length:
                    break
                yield data

    def append(self, data: bytes) -> None:
        """Append a record, or nothing.

        Raises:
            OSError: it cannot be written.
        """
        size, left = self.size, memoryview(_HEADER.pack(len(data)) + data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:  # a part of it would hide what is appended later
            self._truncate(size)
            raise

    def rewrite(self, records: Sequence[bytes]) -> None:
        """Replace the content: atomically, or in place if a second file does not fit on the disk.

        In place records may be missing afterwards; those to remove never stay.

        Raises:
            OSError: the content is as before.
        """
        try:
            with open(self._partial, "wb", opener=_open_private) as file:
                for data in records:
                    file.write(_HEADER.pack(len(data)) + data)
            self._partial.replace(self._path)
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            logger.warning("%s is rewritten in place: %s", self._path, error)
            self._rewrite_in_place(records)
            return
        old, self._file = self._file, self._open()
        old.close()

    def _rewrite_in_place(self, records: Sequence[bytes]) -> None:
        self._truncate(0)
        for number, data in enumerate(records):
            try:
                self.append(data)
            except OSError as error:
                lost = len(records) - number
                logger.warning("%s: %d records are in memory alone: %s", self._path, lost, error)
                return

    def _truncate(self, size: int) -> None:
        self._file.truncate(size)
        self._file.seek(size)


class ReplayShard:
    """Records of one topic, all splits.

    With a ``persist_dir`` they are also written to a file and survive the actor's death; without
    one a new shard is empty. A thread removes expired records.
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
        """Load the persisted records, if any.

        Args:
            topic: of the records.
            settings: see ReplaySettings.
            persist_dir: folder for ``<topic>.records``.
            seed: of sampling; None is unseeded.
            clock: unix seconds.
        """
        self._topic = topic
        self._settings = settings or ReplaySettings()
        self._buffer = ReplayBuffer(self._settings)
        self._rng = np.random.default_rng(seed)
        self._clock = clock
        self._started_at = clock()
        self._refused = self._refused_values = self._left_out = 0
        self._purges = Purges(clock)
        self._purges_total = 0
        self._sampled: deque[str] = deque(maxlen=_REMEMBERED_SAMPLES)  # evicted since, perhaps
        self._lock = threading.RLock()  # expiry runs in a thread of its own
        self._oldest_written = math.inf  # unix seconds, creation of the journal's oldest record
        self._journal: Journal | None = None
        if persist_dir is not None:
            self._journal = Journal(Path(persist_dir) / f"{topic}{FILE_SUFFIX}")
            for data in self._journal.read():
                self._insert(data, needs_source=False)
            self._buffer.restored()
            self._compact()
        _start_expiry_thread(weakref.ref(self), self._settings.disk_slack_s / 2)

    def insert(self, data: bytes, left_out: int = 0) -> None:
        """Insert an encoded record; invalid bytes are counted and dropped.

        A record is dropped if it was purged before it came, a synthetic one if the record it was
        made from is gone.

        Args:
            data: the record.
            left_out: requests of the topic since its last record that left none; they count as
                traffic.
        """
        with self._lock:
            self._left_out += left_out
            record = self._insert(data, needs_source=True)
            if record is not None and self._journal is not None:
                self._journal.append(data)
                self._oldest_written = min(self._oldest_written, record.created)
                if self._journal.size > 2 * self._settings.capacity_bytes:
                    self._compact()
            self._compact_if_due()

    def sample(self, n: int, split: Split) -> list[bytes]:
        """At most ``n`` different encoded records of a split, drawn by the configured sampler."""
        with self._lock:
            records = self._buffer.sample(n, split, self._clock(), self._rng)
            self._sampled.extend(record.request_id for record in records)
            return [record.data for record in records]

    def update_losses(self, losses: dict[str, float]) -> None:
        """Store a training draft's losses on records, nats, by request_id.

        They order sampling and removal by priority. They are not persisted: after a restart the
        loss of every record is unknown.
        """
        with self._lock:
            self._buffer.update_losses(losses)

    def delete(self, request_id: str | None) -> int:
        """Remove a request's records, or with None all, from memory and disk; returns how many.

        Raises:
            OSError: they are still on disk; their removal is retried.
        """
        with self._lock:
            self._purges.add(request_id)
            removed = self._buffer.delete(request_id)
            read = any(belongs(name, request_id) for name in self._sampled)
            self._purges_total += request_id is None or removed > 0 or read
            self._compact()
            return removed

    def expire(self) -> None:
        """Remove records past retention, from disk if they have been there for too long."""
        with self._lock:
            self._buffer.expire(self._clock())
            self._compact_if_due()

    def stats(self) -> ShardStats:
        """Counts per split, and since the start."""
        with self._lock:
            return replace(
                self._buffer.stats(self._clock()),
                topic=self._topic,
                refused_total=self._refused,
                refused_values_total=self._refused_values,
                left_out_total=self._left_out,
                purges_total=self._purges_total,
                started_at=self._started_at,
            )

    def _insert(self, data: bytes, *, needs_source: bool) -> EncodedRecord | None:
        """Put a record into the buffer; None if it is invalid, purged, expired or not to be kept.

        Args:
            data: encoded.
            needs_source: drop a synthetic record if its source is gone.
        """
        try:
            record = decode(data)
        except RecordError as error:
            self._refused += 1
            self._refused_values += isinstance(error, RecordValueError)
            logger.warning("%s: %s", self._topic, error)
            return None
        if self._purges.cover(record.request_id, self._topic, record.created):
            return None
        held_out = is_held_out(record.conversation, self._settings.held_out_fraction)
        encoded = EncodedRecord(record.request_id, record.created, bytes(data))
        split: Split = "held_out" if held_out else "train"
        if is_synthetic(record.request_id):
            if held_out:  # a held-out prompt must not be trained on, whatever its origin
                return None
            if needs_source and source_id(record.request_id) not in self._buffer:
                return None
            split = "synthetic"
        return encoded if self._buffer.insert(encoded, split, self._clock()) else None

    def _compact_if_due(self) -> None:
        """Rewrite the file if its oldest record is past retention and half of the slack.

        The other half is the interval of the expiry thread.
        """
        limit_s = self._settings.retention_s + self._settings.disk_slack_s / 2
        if self._clock() - self._oldest_written > limit_s:
            self._buffer.expire(self._clock())
            self._compact()

    def _compact(self) -> None:
        """Rewrite the file with the buffer's records."""
        if self._journal is not None:
            records = self._buffer.records()
            self._oldest_written = -math.inf  # if the rewrite fails, it stays due
            self._journal.rewrite([record.data for record in records])
            self._oldest_written = min((r.created for r in records), default=math.inf)


class ShardHandle:
    """Handle of a ReplayShard, which is an actor or in one, see HostedShard."""

    insert = remote_method(ReplayShard.insert)
    sample = remote_method(ReplayShard.sample)
    update_losses = remote_method(ReplayShard.update_losses)
    delete = remote_method(ReplayShard.delete)
    stats = remote_method(ReplayShard.stats)


def _start_expiry_thread(reference: weakref.ref[ReplayShard], interval_s: float) -> None:
    """Call ``expire`` in a thread for as long as the shard lives."""
    ended = threading.Event()
    shard = reference()
    assert shard is not None
    weakref.finalize(shard, ended.set)

    def run() -> None:
        while not ended.wait(interval_s):
            if (shard := reference()) is None:
                return
            try:
                shard.expire()
            except Exception:
                logger.warning("expired records could not be removed", exc_info=True)
            del shard

    threading.Thread(target=run, name="paceline-expiry", daemon=True).start()
