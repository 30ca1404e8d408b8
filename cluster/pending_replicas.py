"""Replicas of Serve that wait for resources, by Ray's own books."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import ray
from ray import serve

from paceline.cluster.scheduler.leases import Amounts, ReplicaDemand

_EPSILON = 1e-6
_TIMEOUT_S = 5


class PendingReplicas(NamedTuple):
    """Pending replicas, and node to unbooked resources."""

    demands: list[ReplicaDemand]
    free: dict[str, dict[str, float]]


def find_pending(booked: Amounts, pending_trainers: int) -> PendingReplicas:
    """Ask Ray for pending actors, and Serve's controller how many replicas it starts.

    Args:
        booked: what Ray books for a trainer.
        pending_trainers: trainers that may be among the pending actors.

    Raises:
        Exception: whatever Ray raises if one of them does not answer.
    """
    # Imported late: not needed unless trainers book something.
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address, _TIMEOUT_S)
    nodes = [*status.active_nodes, *status.idle_nodes]
    free = {node.node_id: node.available_resources() for node in nodes}
    pending = [
        ReplicaDemand(dict(each.bundle), each.count)
        for demand in status.resource_demands.ray_task_actor_demand
        for each in demand.bundles_by_count
    ]
    if not pending:
        return PendingReplicas([], free)
    starting = count_starting(serve.status())
    return PendingReplicas(demands_of_serve(pending, starting, booked, pending_trainers), free)


def count_starting(status: Any) -> int:
    """Number of replicas, of all deployments, that Serve has requested and that do not run yet."""
    return sum(
        int(count)
        for application in status.applications.values()
        for deployment in application.deployments.values()
        for state, count in deployment.replica_states.items()
        if getattr(state, "value", state) == "STARTING"
    )


def demands_of_serve(
    pending: Iterable[ReplicaDemand], starting: int, booked: Amounts, pending_trainers: int
) -> list[ReplicaDemand]:
    """The part of the pending actors that are replicas.

    Ray does not say to which job an actor belongs: demands that equal a trainer's are attributed
    to trainers first, and no more than Serve starts are replicas.

    Args:
        pending: pending actors of the cluster.
        starting: replicas that Serve starts.
        booked: what Ray books for a trainer.
        pending_trainers: trainers that may be among the pending actors.
    """
    left, found = starting, list[ReplicaDemand]()
    for demand in pending:
        own = pending_trainers if _equal(demand.amounts, booked) else 0
        taken = min(max(0, demand.count - own), left)
        left -= taken
        if taken:
            found.append(ReplicaDemand(demand.amounts, taken))
    return found


def _equal(one: Amounts, other: Amounts) -> bool:
    names = one.keys() | other.keys()
    return all(abs(one.get(name, 0.0) - other.get(name, 0.0)) < _EPSILON for name in names)
