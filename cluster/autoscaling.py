"""The rule of :mod:`paceline.cluster.autoscaling` as Serve asks it, and Serve's options for it."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingPolicy

from paceline.cluster.section import Count, Seconds, Section

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


logger = logging.getLogger(__name__)

_POLICY = f"{__name__}.LoadPolicy"
_REPORTS_PER_LOOK_BACK = 5.0
# What replicas report of themselves: ``record_autoscaling_stats`` of target and experts.
_LOAD, _USEFUL = "load", "useful"


class LoadPolicy:
    """Asked by Serve's controller ten times a second; bounds and delays are Serve's work.

    Serve's own rule counts requests under way. Here that says nothing of how full a replica is:
    an answer is a request whether its rows are four of sixteen or wait for memory, and an
    expert's requests are sessions that last for days.
    """

    def __init__(self, occupancy: float) -> None:
        """Take the aim; Serve makes one policy per deployment."""
        self._occupancy = occupancy

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Serve's AutoscalingContext to the number of replicas, and no state."""
        present: int = context.target_num_replicas
        try:
            return self._wanted(context, present), {}
        except Exception:  # raised here, it would stop the controller's care for all deployments
            logger.warning("the number of replicas stays as it is", exc_info=True)
            return present, {}

    def _wanted(self, context: Any, present: int) -> int:
        reported = context.aggregated_metrics or {}
        useful = reported.get(_USEFUL)
        return wanted_replicas(
            reported.get(_LOAD, {}).values(),
            present,
            occupancy=self._occupancy,
            least=context.capacity_adjusted_min_replicas,
            most=context.capacity_adjusted_max_replicas,
            useful=None if useful is None else round(sum(useful.values())),
        )


def replica_options(num_replicas: int, autoscaling: AutoscalingConfig | None) -> dict[str, Any]:
    """Serve's options for a deployment's number of replicas.

    Args:
        num_replicas: of one that is not scaled.
        autoscaling: None: it is not.
    """
    if autoscaling is None:
        return {"num_replicas": num_replicas}
    with warnings.catch_warnings():
        # The variables that it names instead are read by nothing in Ray 2.60.
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
        scaled = ServeAutoscaling(
            min_replicas=autoscaling.min_replicas,
            max_replicas=autoscaling.max_replicas,
            upscale_delay_s=autoscaling.upscale_delay_s,
            downscale_delay_s=autoscaling.downscale_delay_s,
            metrics_interval_s=autoscaling.look_back_s / _REPORTS_PER_LOOK_BACK,
            look_back_period_s=autoscaling.look_back_s,
            policy=AutoscalingPolicy(
                policy_function=_POLICY, policy_kwargs={"occupancy": autoscaling.occupancy}
            ),
        )
    return {"autoscaling_config": scaled}
