"""What asking the pool costs, measured before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from paceline.actors.engine.request import SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.costs import grid_points, profile
from paceline.actors.speculation.pool.proposer import PoolProposer
from paceline.actors.speculation.proposer import DraftRow

logger = logging.getLogger(__name__)

_WAIT_S = 20.0
_ROUND_S = 2.0
_CONTEXT = 128
_STEPS = 4
_MOST_READS = 256  # questions until an expert has read the prompts
_GUESS = 0.5  # of a target's step, where no expert answers


class _NotDraftedError(Exception):
    """A round of the profile came back without its drafts."""


def profile_pool(
    pool: PoolProposer, settings: TargetSettings, rows: Sequence[int], target_s: float
) -> dict[tuple[int, int], float]:
    """Seconds of one draft step by (rows, experts), with its share of a round trip.

    Waits some seconds for the experts to be there. Where they are not, the costs are a guess that
    the first rounds correct.

    Args:
        pool: not in use yet.
        settings: of the target.
        rows: grid of batch sizes.
        target_s: seconds of a target step of one row and token.
    """
    found = pool.wait_for_links(_WAIT_S)
    experts = grid_points(min(len(settings.drafts), settings.max_num_seqs))
    rounds = _Rounds(pool, found, settings.prefill_chunk)
    try:
        if len(found) == len(settings.drafts):
            times = profile(rounds.run, rows, experts, time.perf_counter)
            return {size: seconds / _STEPS for size, seconds in times.items()}
        logger.warning("%d of %d experts are there", len(found), len(settings.drafts))
    except _NotDraftedError:
        logger.warning("the experts do not answer a profile")
    finally:
        rounds.release()
    return {(b, e): _GUESS * target_s for b in rows for e in experts}


class _Rounds:
    """Rounds of made-up sequences, the same ones as long as the sizes stay."""

    def __init__(self, pool: PoolProposer, experts: Sequence[str], prefill_chunk: int) -> None:
        self._pool = pool
        self._experts = experts
        self._prefill_chunk = prefill_chunk
        self._size = (0, 0)
        self._rows: list[DraftRow] = []

    def run(self, batch: int, experts: int) -> None:
        """One round over so many experts; the first of a size, which warms up, has prompts read.

        Raises:
            _NotDraftedError: an expert was silent.
        """
        reads = 0
        if self._size != (batch, experts):
            self.release()
            self._size = (batch, experts)
            self._rows = [self._row(i, self._experts[i % experts], batch) for i in range(batch)]
            reads = _MOST_READS
        while not self._drafted():
            if not reads:
                raise _NotDraftedError
            reads -= 1

    def _drafted(self) -> bool:
        """Whether a round had its drafts; it waits for a silent expert no more than once."""
        drafted = self._pool.propose(self._rows, ahead=False, timeout_s=_ROUND_S).num_drafted
        return int(drafted.min()) >= _STEPS

    def release(self) -> None:
        """End the sequences."""
        for row in self._rows:
            self._pool.release(row.request_id)
        self._rows = []

    def _row(self, number: int, expert: str, batch: int) -> DraftRow:
        return DraftRow(
            request_id=f"profile-{number}",
            draft=expert,
            tokens=[0] * max(1, min(_CONTEXT, self._prefill_chunk // batch)),
            num_output=0,
            num_draft_tokens=_STEPS,
            sampling=SamplingParams(max_tokens=_STEPS + 1, temperature=0.0),
        )
