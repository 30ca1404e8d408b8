"""What went through this front door in the last minutes: counts by topic and draft. Pure."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from paceline.actors.engine.request import DRAFT_OFF, GenerationChunk, GenerationRequest

logger = logging.getLogger(__name__)

_QUIET_S = 0.02  # what is told keeps trainers off for longer than that


class Arrivals:
    """Announces requests to the trainer scheduler, at most 50 times a second; never fails."""

    def __init__(self, scheduler: Any, clock: Callable[[], float]) -> None:
        """Tell nothing yet.

        Args:
            scheduler: actor handle of the trainer scheduler; None: nothing is announced.
            clock: monotonic seconds.
        """
        self._scheduler = scheduler
        self._clock = clock
        self._told_at = -_QUIET_S

    def tell(self) -> None:
        """A request has come. Nothing is waited for."""
        now = self._clock()
        if self._scheduler is None or now - self._told_at < _QUIET_S:
            return
        self._told_at = now
        try:
            self._scheduler.announce_request.remote()
        except Exception as error:
            logger.info("a request was not announced to the trainer scheduler (%r)", error)


COLUMNS = ("at", "topic", "draft", "requests", "tokens", "rounds", "drafted", "accepted")
_Counts = list[int]  # COLUMNS without the first three


class RecentTraffic:
    """A ring of buckets. Streams count as they go, whole answers when they are there.

    Every replica of the front door has its own; who wants the whole picture adds them up.
    """

    def __init__(
        self,
        replica: str,
        clock: Callable[[], float],
        bucket_s: float = 5.0,
        keep_s: float = 900.0,
    ) -> None:
        """Begin with nothing.

        Args:
            replica: a name that no other replica has, nor this one after a restart.
            clock: unix seconds.
            bucket_s: length of a bucket.
            keep_s: how far back buckets reach.
        """
        self._replica = replica
        self._clock = clock
        self._bucket_s = bucket_s
        self._keep_s = keep_s
        self._buckets: OrderedDict[int, dict[tuple[str, str], _Counts]] = OrderedDict()

    def add(self, request: GenerationRequest, chunk: GenerationChunk) -> None:
        """Count a piece of an answer; the last one brings what was drafted for it."""
        counts = self._now().setdefault((request.topic, asked_draft(request)), [0] * 5)
        counts[1] += len(chunk.token_ids) + chunk.num_cut_tokens
        figures = chunk.speculative
        if figures is not None:
            counts[0] += 1
            counts[2] += figures.num_spec_steps
            counts[3] += figures.num_draft_tokens
            counts[4] += figures.num_accepted_draft_tokens

    def add_all(
        self, requests: Sequence[GenerationRequest], chunks: Iterable[GenerationChunk]
    ) -> None:
        """Count whole response_builder."""
        for request, chunk in zip(requests, chunks, strict=True):
            self.add(request, chunk)

    async def watched(
        self,
        pieces: AsyncGenerator[tuple[int, GenerationChunk], None],
        requests: Sequence[GenerationRequest],
    ) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        """The same pieces, counted; closing it closes them."""
        async with aclosing(pieces):
            async for index, chunk in pieces:
                self.add(requests[index], chunk)
                yield index, chunk

    def _now(self) -> dict[tuple[str, str], _Counts]:
        bucket = int(self._clock() // self._bucket_s)
        oldest = bucket - int(self._keep_s // self._bucket_s)
        while self._buckets and next(iter(self._buckets)) < oldest:
            self._buckets.popitem(last=False)
        return self._buckets.setdefault(bucket, {})

    def view(self, since: float = 0.0) -> dict[str, Any]:
        """Rows of the buckets that end after ``since`` (unix seconds), oldest first.

        ``at`` is where a bucket begins, unix seconds; ``tokens`` were given out, the others
        belong to the ``requests`` that ended in the bucket.
        """
        oldest = max(since, self._clock() - self._keep_s)
        rows = [
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


def asked_draft(request: GenerationRequest) -> str:
    """The draft that a request is for: ``off`` where it wants none."""
    return DRAFT_OFF if request.num_speculative_tokens == 0 else request.draft
