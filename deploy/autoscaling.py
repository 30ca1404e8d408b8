"""How many replicas a load wants: the rule and its configuration, free of Serve and of clocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import Field, model_validator

from paceline.deploy.section import Count, Seconds, Section

# A replica goes where those that stay would be no fuller than this part of the aim: what has just
# gone must not be wanted back at once.
_SLACK = 0.8
_ROUNDING = 1e-9  # 0.7 / 0.7 must not be two replicas for the sake of the last bit


class AutoscalingConfig(Section):
    """As many replicas as keep each at ``occupancy``, between the two bounds.

    A target's occupancy is that of its batch, and it counts as full as soon as requests wait in
    its queue. An expert's is the share of the time in which it drafts. Both are means over
    ``look_back_s``. More replicas must be wanted for ``upscale_delay_s`` in a row, fewer for
    ``downscale_delay_s``.
    """

    min_replicas: Count = 1
    max_replicas: Count = 2
    occupancy: Annotated[float, Field(gt=0.0, le=1.0)] = 0.7
    upscale_delay_s: Annotated[float, Field(ge=0.0)] = 10.0
    downscale_delay_s: Annotated[float, Field(ge=0.0)] = 300.0
    look_back_s: Seconds = 10.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas ({self.max_replicas}) is less than min_replicas "
                f"({self.min_replicas})"
            )
        return self


def most_replicas(num_replicas: int, autoscaling: AutoscalingConfig | None) -> int:
    """Replicas of a deployment at most; ``num_replicas`` is for those that are not scaled."""
    return num_replicas if autoscaling is None else autoscaling.max_replicas


def wanted_replicas(
    loads: Iterable[float],
    present: int,
    *,
    occupancy: float,
    least: int,
    most: int,
    useful: int | None = None,
) -> int:
    """How many replicas there should be.

    It never falls when a load rises, and a load that stays gives the same number again.

    Args:
        loads: of every replica that serves, in full replicas: 1.0 is one with nothing to spare,
            2.0 one that has as much waiting as it can do.
        present: replicas that there are to be by the last word.
        occupancy: how full each should be, above 0.
        least: never fewer.
        most: never more.
        useful: beyond so many a further one would get nothing to do; None: no such bound.
    """
    load = sum(loads)
    enough = math.ceil(load / occupancy - _ROUNDING)
    at_ease = math.ceil(load / (occupancy * _SLACK) - _ROUNDING)
    wanted = max(enough, min(present, at_ease))
    if useful is not None:
        wanted = min(wanted, useful)
    return max(least, min(wanted, most))
