"""Number of replicas by measured load: the rule, Serve's policy and options for it."""

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

# Scale down only if the others would stay below this part of the target occupancy: hysteresis.
_DOWNSCALE_MARGIN = 0.8
_ROUNDING = 1e-9  # 0.7 / 0.7 is one replica


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
    """Upper bound of a deployment's replicas: ``num_replicas`` without autoscaling."""
    return num_replicas if autoscaling is None else autoscaling.max_replicas


def least_replicas(num_replicas: int, autoscaling: AutoscalingConfig | None) -> int:
    """Number of a deployment's replicas at its start."""
    return num_replicas if autoscaling is None else autoscaling.min_replicas


def wanted_replicas(
    loads: Iterable[float],
    present: int,
    *,
    occupancy: float,
    least: int,
    most: int,
    useful: int | None = None,
) -> int:
    """Number of replicas for the load; monotonic in it and stable under constant load.

    Args:
        loads: of the running replicas, in full replicas: 1.0 has no spare capacity, 2.0 has as
            much queued again.
        present: current target number of replicas.
        occupancy: target load of each, above 0.
        least: lower bound.
        most: upper bound.
        useful: number beyond which a replica would be idle; None for no such bound.
    """
    load = sum(loads)
    enough = math.ceil(load / occupancy - _ROUNDING)
    with_margin = math.ceil(load / (occupancy * _DOWNSCALE_MARGIN) - _ROUNDING)
    wanted = max(enough, min(present, with_margin))
    if useful is not None:
        wanted = min(wanted, useful)
    return max(least, min(wanted, most))


logger = logging.getLogger(__name__)

_POLICY = f"{__name__}.LoadPolicy"
_REPORTS_PER_LOOK_BACK = 5.0
# Keys of ``record_autoscaling_stats`` of target and experts.
_LOAD, _USEFUL = "load", "useful"


class LoadPolicy:
    """Autoscaling policy of Serve's controller, called ten times a second.

    Serve's own policy counts requests, which do not measure load here: a request may have several
    rows or wait for memory, and an expert's requests are sessions that last for days.
    """

    def __init__(self, occupancy: float) -> None:
        self._occupancy = occupancy

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Number of replicas for Serve's AutoscalingContext, and no state."""
        present: int = context.target_num_replicas
        try:
            return self._wanted(context, present), {}
        except Exception:  # raised here, it would stop the controller for all deployments
            logger.warning("the number of replicas is not changed", exc_info=True)
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
    """Serve's options for a deployment's number of replicas; ``num_replicas`` if not scaled."""
    if autoscaling is None:
        return {"num_replicas": num_replicas}
    with warnings.catch_warnings():
        # Nothing in Ray 2.60 reads the variables that the warning names.
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
