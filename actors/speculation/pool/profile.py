"""Costs of drafting with the pool, measured before the first request."""

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

_CONNECT_TIMEOUT_S = 20.0
_ROUND_TIMEOUT_S = 2.0
_CONTEXT = 128  # tokens
_STEPS = 4
_MAX_PREFILL_ROUNDS = 256
_GUESS = 0.5  # of a target's step


class _NotDraftedError(Exception):
    """A profiling round came back without its drafts."""


def profile_pool(
    pool: PoolProposer, settings: TargetSettings, rows: Sequence[int], target_s: float
) -> dict[tuple[int, int], float]:
    """Measure the seconds of a draft step by (rows, experts), with its share of a round trip.

    Waits for the experts. Without them the costs are a guess, which the first rounds correct.

    Args:
        pool: not in use yet.
        settings: of the target.
        rows: grid of batch sizes.
        target_s: seconds of a target step of one row and token.
    """
    connected = pool.wait_connected(_CONNECT_TIMEOUT_S)
    experts = grid_points(min(len(settings.drafts), settings.max_num_seqs))
    rounds = _ProfileRounds(pool, connected, settings.prefill_chunk)
    try:
        if len(connected) == len(settings.drafts):
            times = profile(rounds.run, rows, experts, time.perf_counter)
            return {size: seconds / _STEPS for size, seconds in times.items()}
        logger.warning("%d of %d experts are connected", len(connected), len(settings.drafts))
    except _NotDraftedError:
        logger.warning("experts do not respond to profiling")
    finally:
        rounds.release()
    return {(b, e): _GUESS * target_s for b in rows for e in experts}


class _ProfileRounds:
    """Rounds of synthetic sequences, reused as long as the batch's size stays."""

    def __init__(self, pool: PoolProposer, experts: Sequence[str], prefill_chunk: int) -> None:
        self._pool = pool
        self._experts = experts
        self._prefill_chunk = prefill_chunk
        self._size = (0, 0)
        self._rows: list[DraftRow] = []

    def run(self, batch: int, experts: int) -> None:
        """Run one round over so many experts; the first of a size prefills its prompts.

        Raises:
            _NotDraftedError: an expert did not draft.
        """
        prefill_rounds = 0
        if self._size != (batch, experts):
            self.release()
            self._size = (batch, experts)
            self._rows = [self._row(i, self._experts[i % experts], batch) for i in range(batch)]
            prefill_rounds = _MAX_PREFILL_ROUNDS
        while not self._drafted():
            if not prefill_rounds:
                raise _NotDraftedError
            prefill_rounds -= 1

    def _drafted(self) -> bool:
        """Run a round; return whether every row has all its drafts."""
        proposal = self._pool.propose(self._rows, draft_ahead=False, timeout_s=_ROUND_TIMEOUT_S)
        return int(proposal.num_drafted.min()) >= _STEPS

    def release(self) -> None:
        """Release the sequences."""
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
