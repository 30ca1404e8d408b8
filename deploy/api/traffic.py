"""Notice of arriving requests, and counts of recent traffic by topic and draft."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TypedDict

from paceline.actors.engine.request import DRAFT_OFF, GenerationChunk, GenerationRequest
from paceline.cluster.scheduler.trainer_scheduler import TrainerSchedulerHandle

logger = logging.getLogger(__name__)

_NOTIFY_INTERVAL_S = 0.02  # one notice keeps trainers off for longer than that


class ArrivalNotifier:
    """Notifies the trainer scheduler of arriving requests, at most 50 times per second.

    Args:
        scheduler: actor handle of the trainer scheduler.
        clock: monotonic seconds.
    """

    def __init__(self, scheduler: TrainerSchedulerHandle, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._notified_at = -_NOTIFY_INTERVAL_S

    def notify(self) -> None:
        """Send a notice without waiting; errors are logged."""
        now = self._clock()
        if now - self._notified_at < _NOTIFY_INTERVAL_S:
            return
        self._notified_at = now
        try:
            self._scheduler.announce_request.remote()
        except Exception as error:
            logger.info("the trainer scheduler was not notified of a request (%r)", error)


class TrafficRows(TypedDict):
    """Recent traffic of one ingress replica.

    Attributes:
        replica: its name, new after every restart.
        now: unix seconds.
        bucket_s: length of a bucket.
        keep_s: age at which buckets are dropped.
        columns: names of a row's fields. ``at`` is a bucket's start (unix seconds). ``tokens``
            were generated in the bucket; the other columns count the ``requests`` that finished in
            it.
        rows: oldest first.
    """

    replica: str
    now: float
    bucket_s: float
    keep_s: float
    columns: list[str]
    rows: list[list[float | str]]


COLUMNS = ("at", "topic", "draft", "requests", "tokens", "rounds", "drafted", "accepted")
_Counts = list[int]  # COLUMNS without the first three


class RecentTraffic:
    """Counts of one ingress replica's recent traffic, in a ring of time buckets.

    Streams count as they go, other responses when they are complete.

    Args:
        replica: a unique name, new after every restart.
        clock: unix seconds.
        bucket_s: length of a bucket.
        keep_s: age at which buckets are dropped.
        observe: takes the requests that may use drafts, with their chunks.
    """

    def __init__(
        self,
        replica: str,
        clock: Callable[[], float],
        bucket_s: float = 5.0,
        keep_s: float = 900.0,
        observe: Callable[[GenerationRequest, GenerationChunk], object] = lambda *_: None,
    ) -> None:
        self._replica = replica
        self._clock = clock
        self._bucket_s = bucket_s
        self._keep_s = keep_s
        self._buckets: OrderedDict[int, dict[tuple[str, str], _Counts]] = OrderedDict()
        self._observe = observe

    def record(self, request: GenerationRequest, chunk: GenerationChunk) -> None:
        """Count a chunk; a request's last one has its speculation statistics."""
        draft = DRAFT_OFF if request.num_speculative_tokens == 0 else request.draft
        counts = self._current_bucket().setdefault((request.topic, draft), [0] * 5)
        counts[1] += len(chunk.token_ids) + chunk.num_cut_tokens
        if draft != DRAFT_OFF:
            self._observe(request, chunk)
        stats = chunk.speculative
        if stats is not None:
            counts[0] += 1
            counts[2] += stats.num_spec_steps
            counts[3] += stats.num_draft_tokens
            counts[4] += stats.num_accepted_draft_tokens

    def record_all(
        self, requests: Sequence[GenerationRequest], chunks: Iterable[GenerationChunk]
    ) -> None:
        """Count complete responses, a chunk per request."""
        for request, chunk in zip(requests, chunks, strict=True):
            self.record(request, chunk)

    async def record_stream(
        self,
        chunks: AsyncGenerator[tuple[int, GenerationChunk], None],
        requests: Sequence[GenerationRequest],
    ) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        """The same chunks, counted; closing it closes them."""
        async with aclosing(chunks):
            async for index, chunk in chunks:
                self.record(requests[index], chunk)
                yield index, chunk

    def _current_bucket(self) -> dict[tuple[str, str], _Counts]:
        bucket = int(self._clock() // self._bucket_s)
        oldest = bucket - int(self._keep_s // self._bucket_s)
        while self._buckets and next(iter(self._buckets)) < oldest:
            self._buckets.popitem(last=False)
        return self._buckets.setdefault(bucket, {})

    def rows(self, since: float = 0.0) -> TrafficRows:
        """Rows of the buckets that end after ``since`` (unix seconds)."""
        oldest = max(since, self._clock() - self._keep_s)
        rows: list[list[float | str]] = [
            [bucket * self._bucket_s, topic, draft, *counts]
            for bucket, cells in self._buckets.items()
            if (bucket + 1) * self._bucket_s > oldest
            for (topic, draft), counts in cells.items()
        ]
        return {
            "replica": self._replica,
            "now": self._clock(),
            "bucket_s": self._bucket_s,
            "keep_s": self._keep_s,
            "columns": list(COLUMNS),
            "rows": rows,
        }
