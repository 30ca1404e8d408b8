"""Which replicas of Serve wait for room, by Ray's own books."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import ray
from ray import serve

from paceline.cluster.scheduler.leases import Amounts, ReplicaDemand

_LITTLE = 1e-6
_TIMEOUT_S = 5


class Rooms(NamedTuple):
    """What replicas that wait need, with how many need it, and node to what is free there."""

    demands: list[ReplicaDemand]
    free: dict[str, dict[str, float]]


def rooms(own: Amounts, own_waiting: int) -> Rooms:
    """Ask Ray's store for what waits, and Serve's controller how many of its replicas start.

    Args:
        own: what a trainer needs.
        own_waiting: trainers that are not up, and may be among what waits.

    Raises:
        Exception: whatever Ray raises where one of them does not answer.
    """
    # Imported when it is needed: it is of no use where trainers book nothing.
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address, _TIMEOUT_S)
    nodes = [*status.active_nodes, *status.idle_nodes]
    free = {node.node_id: node.available_resources() for node in nodes}
    waiting = [
        (dict(each.bundle), each.count)
        for demand in status.resource_demands.ray_task_actor_demand
        for each in demand.bundles_by_count
    ]
    if not waiting:
        return Rooms([], free)
    return Rooms(of_serve(waiting, starting(serve.status()), own, own_waiting), free)


def starting(status: Any) -> int:
    """Replicas of all deployments that Serve has asked for and that do not run yet."""
    return sum(
        int(count)
        for application in status.applications.values()
        for deployment in application.deployments.values()
        for state, count in deployment.replica_states.items()
        if getattr(state, "value", state) == "STARTING"
    )


def of_serve(
    waiting: Iterable[tuple[Amounts, int]], replicas: int, own: Amounts, own_waiting: int
) -> list[ReplicaDemand]:
    """What replicas wait for, of all that waits in the cluster.

    Ray does not say whose an actor is: what a trainer would need is a trainer's as far as trainers
    wait, and no more can be replicas' than Serve starts.

    Args:
        waiting: amounts of what waits, and how many such.
        replicas: that Serve starts.
        own: amounts of a trainer.
        own_waiting: trainers that may wait.
    """
    left, found = replicas, list[ReplicaDemand]()
    for amounts, count in waiting:
        others = count - own_waiting if _equal(amounts, own) else count
        taken = min(max(0, others), left)
        left -= taken
        if taken:
            found.append(ReplicaDemand(dict(amounts), taken))
    return found


def _equal(one: Amounts, other: Amounts) -> bool:
    names = one.keys() | other.keys()
    return all(abs(one.get(name, 0.0) - other.get(name, 0.0)) < _LITTLE for name in names)
