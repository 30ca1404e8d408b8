"""What asking the pool costs, measured before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from paceline.actors.decoding.costs import grid_points, profile
from paceline.actors.decoding.pool.proposer import PoolProposer
from paceline.actors.decoding.proposer import DraftRow
from paceline.actors.decoding.request import SamplingParams
from paceline.actors.decoding.settings import TargetSettings

logger = logging.getLogger(__name__)

_WAIT_S = 20.0
_ROUND_S = 2.0
_CONTEXT = 128
_STEPS = 4
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
    try:
        if len(found) == len(settings.drafts):
            times = profile(
                lambda b, e: _round(pool, found[:e], b, settings.prefill_chunk // b),
                rows,
                experts,
                time.perf_counter,
            )
            return {size: seconds / _STEPS for size, seconds in times.items()}
        logger.warning("%d of %d experts are there", len(found), len(settings.drafts))
    except _NotDraftedError:
        logger.warning("the experts do not answer a profile")
    finally:
        for number in range(max(rows)):
            pool.release(_name(number))
    return {(b, e): _GUESS * target_s for b in rows for e in experts}


def _name(number: int) -> str:
    return f"profile-{number}"


def _round(pool: PoolProposer, experts: Sequence[str], batch: int, context: int) -> None:
    """One round of a batch over the experts, prompts of one prefill chunk together."""
    sampling = SamplingParams(max_tokens=_STEPS + 1, temperature=0.0)
    asked = [
        DraftRow(
            request_id=_name(i),
            draft=experts[i % len(experts)],
            tokens=[0] * max(1, min(_CONTEXT, context)),
            num_output=0,
            num_draft_tokens=_STEPS,
            sampling=sampling,
        )
        for i in range(batch)
    ]
    drafted = pool.propose(asked, ahead=False, timeout_s=_ROUND_S).num_drafted
    if int(drafted.min()) < _STEPS:
        raise _NotDraftedError
