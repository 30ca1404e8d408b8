"""How a round's prefill budget is shared by the prompts that wait for it."""

from __future__ import annotations

from collections.abc import Sequence


def prefill_shares(lacking: Sequence[int], budget: int) -> list[int]:
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
