"""Who runs, who waits: requests in the order in which they came, as far as rows and memory go."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from paceline.actors.engine.kv_cache import KVBlocks, RowTable
from paceline.actors.engine.sequence import Sequence

logger = logging.getLogger(__name__)


class Schedule:
    """Gives requests rows and key/value blocks, and takes them back.

    ``running`` is in the order of arrival, and all of it came before all of ``waiting``.
    """

    def __init__(
        self,
        kv: KVBlocks,
        rows: int,
        max_speculative_tokens: int,
        prefix_cache: bool,
        on_release: Callable[[str], None],
    ) -> None:
        """Begin with nobody.

        Args:
            kv: the target's memory; a single request always fits.
            rows: most requests at once.
            max_speculative_tokens: a round drafts at most as many for a request that names no
                number of its own.
            prefix_cache: whether requests begin with what earlier ones have computed.
            on_release: called with the id of a request that gives up its row.
        """
        self.rows = RowTable(rows)
        self.running: dict[str, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self.admitted: list[str] = []  # in the latest round
        self._refused: tuple[str, int, int] | None = None
        self._kv = kv
        self._longest_draft = max_speculative_tokens
        self._prefix_cache = prefix_cache
        self._on_release = on_release

    def grow(self) -> None:
        """Have blocks for what every running request writes in the coming round.

        Where they run out, the youngest gives up its own and waits again. The oldest never does,
        and alone it always fits: so every request comes to its end.
        """
        for sequence in list(self.running.values()):
            while sequence.request_id in self.running and not self._kv.reserve(
                self.rows.row(sequence.request_id), self._needed(sequence)
            ):
                self._preempt(next(reversed(self.running.values())))

    def admit(self) -> None:
        """Begin with waiting requests, in their order, as long as rows and blocks are free.

        Every running request that may still grow keeps a block to do so, or the new one would
        soon have to give up its own.
        """
        self.admitted = []
        while self.waiting and not self.rows.full:
            sequence = self.waiting[0]
            state = (sequence.request_id, self._kv.pool.available, len(self.running))
            if state == self._refused:  # nothing has been freed since
                return
            row = self.rows.add(sequence.request_id)
            known = sequence.tokens[:-1] if self._prefix_cache else ()
            spare = sum(map(self._grows, self.running.values()))
            prompt = len(sequence.request.prompt_token_ids)
            computed = self._kv.begin(row, known, self._needed(sequence), spare, prompt)
            if computed is None:
                self.rows.release(sequence.request_id)
                self._refused = state
                return
            self.waiting.popleft()
            self.running[sequence.request_id] = sequence
            self.admitted.append(sequence.request_id)
            sequence.begin(computed)

    def keep(self, sequence: Sequence) -> None:
        """Leave a running request's full blocks to those that begin like it.

        What runs in the background leaves none: it would drive out what users may come back to.
        """
        request = sequence.request
        if self._prefix_cache and request.store and not request.background:
            row = self.rows.row(sequence.request_id)
            self._kv.keep(row, sequence.tokens[: sequence.num_computed])

    def release(self, request_id: str, *, wipe: bool = False) -> None:
        """Take a running request out and free what it holds; ``wipe`` overwrites it first."""
        del self.running[request_id]
        self._on_release(request_id)
        row = self.rows.release(request_id)
        if wipe:
            self._kv.wipe(row)
        self._kv.release(row)

    def _preempt(self, sequence: Sequence) -> None:
        """Put a running request back to the head of the queue.

        It keeps its tokens; their keys and values are computed again when there is room.
        """
        logger.debug("request %s gives up its memory for now", sequence.request_id)
        self.preemptions += 1
        self.keep(sequence)
        self.release(sequence.request_id)
        self.waiting.appendleft(sequence)

    def _needed(self, sequence: Sequence) -> int:
        """Positions that a request's next round may write, those before included."""
        k = sequence.num_speculative_tokens
        return len(sequence.tokens) + sequence.budget(self._longest_draft if k is None else k)

    def _grows(self, sequence: Sequence) -> bool:
        """Whether a running request may need more blocks than it holds."""
        longest = len(sequence.request.prompt_token_ids) + sequence.max_tokens
        return not self._kv.holds(self.rows.row(sequence.request_id), longest)


def prefill_shares(lacking: list[int], budget: int) -> list[int]:
    """Tokens to compute for every prompt in this round.

    Half of the budget is for the oldest prompt, so that a long one always gets on; the rest goes
    to the shortest first, so that a long one holds up no short one. What they leave is the
    oldest's.

    Args:
        lacking: tokens that every prompt still lacks, the oldest first.
        budget: tokens that a round may compute.

    Returns:
        a share per prompt, in the same order; as much of the budget as the prompts can take.
    """
    if not lacking:
        return []
    shares = [0] * len(lacking)
    shares[0] = min(lacking[0], budget - budget // 2)
    left = budget - shares[0]
    for i in sorted(range(1, len(lacking)), key=lacking.__getitem__):
        shares[i] = min(lacking[i], left)
        left -= shares[i]
    shares[0] += min(lacking[0] - shares[0], left)
    return shares
