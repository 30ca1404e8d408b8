"""The rule of :mod:`paceline.deploy.autoscaling` as Serve asks it, and Serve's options for it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingPolicy

from paceline.deploy.autoscaling import AutoscalingConfig, wanted_replicas

logger = logging.getLogger(__name__)

_POLICY = f"{__name__}.LoadPolicy"
_REPORTS_PER_LOOK_BACK = 5.0
# What replicas report of themselves: ``record_autoscaling_stats`` of target and experts.
_LOAD, _USEFUL = "load", "useful"


class LoadPolicy:
    """Asked by Serve's controller ten times a second; bounds and delays are Serve's work.

    Serve's own rule counts requests under way. Here that says nothing of how full a replica is:
    an answer is a request whether its rows are four of sixteen or wait for memory, and an
    expert's requests are leases that last for days.
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
