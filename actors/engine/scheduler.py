"""First-come, first-served scheduling within the batch rows and the KV cache."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from paceline.actors.engine.kv_cache import KVCache, RowAllocator
from paceline.actors.engine.sequence import Sequence

logger = logging.getLogger(__name__)


class Scheduler:
    """Admits and preempts requests, and allocates their rows and KV blocks.

    Attributes:
        rows: batch rows of the running requests.
        running: by request id, in order of arrival; all of them arrived before ``waiting``.
        waiting: queue in order of arrival.
        num_preemptions: preemptions so far.
        num_looked_up: prompt tokens that were looked up in the prefix cache so far; those of
            preempted requests not again.
        num_cached: of these, found.
        admitted: ids of the requests that got a row in the latest :meth:`schedule`.
    """

    def __init__(
        self,
        kv: KVCache,
        max_num_seqs: int,
        max_speculative_tokens: int,
        prefix_cache: bool,
        on_free: Callable[[str], None],
    ) -> None:
        """Set the limits.

        Args:
            kv: the target's; a single request always fits.
            max_num_seqs: maximum number of running requests.
            max_speculative_tokens: drafted per round at most, for a request without its own
                ``num_speculative_tokens``.
            prefix_cache: reuse the KV blocks of earlier requests with the same prefix.
            on_free: called with the id of a request that loses its row.
        """
        self.rows = RowAllocator(max_num_seqs)
        self.running: dict[str, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.num_looked_up = self.num_cached = 0
        self.admitted: list[str] = []
        self._not_admitted: tuple[str, int, int] | None = None  # id, available blocks, running
        self._kv = kv
        self._max_speculative_tokens = max_speculative_tokens
        self._prefix_cache = prefix_cache
        self._on_free = on_free

    def schedule(self) -> None:
        """Allocate the blocks of the next round, then admit waiting requests."""
        self._allocate_running()
        self._admit_waiting()

    def _allocate_running(self) -> None:
        """Allocate blocks for what every running request writes in the next round.

        If they run out, the youngest request is preempted. The oldest never is, since it fits
        alone, so every request finishes.
        """
        for sequence in list(self.running.values()):
            while sequence.request_id in self.running and not self._kv.allocate(
                self.rows.row(sequence.request_id), self._max_length(sequence)
            ):
                self._preempt(next(reversed(self.running.values())))

    def _admit_waiting(self) -> None:
        """Admit waiting requests in order while rows and blocks are free.

        A block stays available for each running request that may still grow; otherwise the new
        request would soon be preempted.
        """
        self.admitted = []
        while self.waiting and not self.rows.full:
            sequence = self.waiting[0]
            state = (sequence.request_id, self._kv.allocator.num_available, len(self.running))
            if state == self._not_admitted:  # nothing has been freed since
                return
            row = self.rows.allocate(sequence.request_id)
            num_computed = self._kv.allocate_with_prefix(
                row,
                sequence.tokens[: sequence.first_position] if self._prefix_cache else (),
                self._max_length(sequence),
                watermark=sum(map(self._may_grow, self.running.values())),
                prompt=len(sequence.request.prompt_token_ids),
                salt=sequence.request.cache_salt,
            )
            if num_computed is None:
                self.rows.free(sequence.request_id)
                self._not_admitted = state
                return
            self.waiting.popleft()
            self.running[sequence.request_id] = sequence
            self.admitted.append(sequence.request_id)
            if self._prefix_cache and not sequence.preempted and not sequence.request.background:
                self.num_looked_up += len(sequence.tokens)
                self.num_cached += num_computed
            sequence.start(num_computed)

    def choose_prompts(self, prompts: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Choose the prompts to compute, and those that wait since others have the same beginning.

        Of several whose next block is the same, the oldest prompt of all or else the one with the
        least to compute goes on; the others take what it has computed, see :meth:`take_prefix`.

        Args:
            prompts: running requests that are not prefilled, the oldest first.

        Returns:
            those to compute, the oldest of all first, and the others.
        """
        if not self._prefix_cache or len(prompts) < 2:
            return prompts, []
        computing: list[Sequence] = []
        waiting: list[Sequence] = []
        begun: dict[tuple[str, int], list[list[int]]] = {}  # tokens by salt and end of the block
        size = self._kv.block_size
        for sequence in (prompts[0], *sorted(prompts[1:], key=lambda s: s.num_uncomputed)):
            tokens, end = sequence.tokens, (sequence.num_computed // size + 1) * size
            others = begun.setdefault((sequence.request.cache_salt, end), [])
            shareable = self._kv.is_shareable(self.rows.row(sequence.request_id))
            if shareable and end <= sequence.first_position:
                block = tokens[end - size : end]  # first: most prompts differ there
                same = (o for o in others if o[end - size : end] == block)
                if any(other[:end] == tokens[:end] for other in same):
                    waiting.append(sequence)
                    continue
            computing.append(sequence)
            if sequence.cacheable and shareable and end < len(tokens):
                others.append(tokens)
        return computing, waiting

    def take_prefix(self, sequence: Sequence) -> None:
        """Let a running request take what others have computed of its prompt meanwhile."""
        before = sequence.num_computed
        sequence.num_computed = self._kv.take_prefix(
            self.rows.row(sequence.request_id),
            sequence.tokens[: sequence.first_position],
            before,
            sequence.request.cache_salt,
        )
        if not sequence.preempted:
            sequence.num_cached += sequence.num_computed - before
            self.num_cached += sequence.num_computed - before

    def cache_prefix(self, sequence: Sequence) -> None:
        """Cache a running request's full blocks for requests with the same prefix.

        If memory runs out in here, nothing is cached and no request suffers.
        """
        if self._prefix_cache and sequence.cacheable:
            row = self.rows.row(sequence.request_id)
            tokens = sequence.tokens[: sequence.num_computed]
            try:
                self._kv.cache_prefix(row, tokens, sequence.request.cache_salt)
            except Exception:
                logger.exception("the prefix of request %s is not cached", sequence.request_id)

    def reset_prefix_cache(self) -> None:
        """Let later requests find no KV of those so far; running ones keep theirs."""
        self._kv.reset_prefix_cache()
        for sequence in (*self.running.values(), *self.waiting):
            sequence.cacheable = False

    def free(self, request_id: str, *, zero: bool = False) -> None:
        """Remove a running request and free its row and blocks; ``zero`` overwrites them first."""
        del self.running[request_id]
        self._on_free(request_id)
        row = self.rows.free(request_id)
        if zero:
            self._kv.zero(row)
        self._kv.free(row)

    def _preempt(self, sequence: Sequence) -> None:
        """Move a running request to the head of the queue; its KV is recomputed later."""
        logger.debug("request %s is preempted", sequence.request_id)
        self.num_preemptions += 1
        sequence.preempted = True
        self.cache_prefix(sequence)
        self.free(sequence.request_id)
        self.waiting.appendleft(sequence)

    def _max_length(self, sequence: Sequence) -> int:
        """Return the length that a request may have after its next round, in positions."""
        return len(sequence.tokens) + sequence.most_draft_tokens(self._max_speculative_tokens)

    def _may_grow(self, sequence: Sequence) -> bool:
        """Return whether a running request may need further blocks."""
        longest = len(sequence.request.prompt_token_ids) + sequence.max_tokens
        return not self._kv.is_allocated(self.rows.row(sequence.request_id), longest)


def split_prefill_budget(remaining: list[int], budget: int) -> list[int]:
    """Split a round's prefill tokens among prompts.

    Half of the budget goes to the oldest prompt, so that a long one always makes progress; the
    rest goes to the shortest first, so that a long one delays no short one. The oldest gets what
    they leave.

    Args:
        remaining: tokens still to compute per prompt, the oldest first.
        budget: maximum tokens per round.

    Returns:
        tokens per prompt, in the same order; together min(budget, sum(remaining)).
    """
    if not remaining:
        return []
    shares = [0] * len(remaining)
    shares[0] = min(remaining[0], budget - budget // 2)
    left = budget - shares[0]
    for i in sorted(range(1, len(remaining)), key=remaining.__getitem__):
        shares[i] = min(remaining[i], left)
        left -= shares[i]
    shares[0] += min(remaining[0] - shares[0], left)
    return shares
