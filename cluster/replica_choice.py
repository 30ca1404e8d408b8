"""Choice of the target replica for a request: the least busy one that does not hang.

Serve chooses by cached queue lengths: a stopped process looks idle once the requests that it
received have been withdrawn.
"""

import asyncio
import time
from typing import Any

from ray.exceptions import RayError
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

_PROBING_S = 60.0
_PROBE_TIMEOUT_S = 1.0
_SILENT_S = 5.0


class ReplicaChoice(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Serve is untyped
    """Ranks replicas; Serve takes the least busy one of the first rank that has capacity.

    A request with an ``attempt`` above 0 has lost a replica. For a minute after one, every choice
    probes the replicas: those that do not answer within a second rank last and are not probed
    again for some seconds. Before them rank, for this request, those that failed it
    (``failed_on``): idle again, they would attract it. If several requests wait, Serve may give a
    choice to the one that waits longest. FIFOMixin is needed since attempts of one request share
    the id by which Serve would distinguish them.
    """

    _probe_until = 0.0
    _turn = 0

    def initialize_state(self, **_options: Any) -> None:
        """Probe nothing yet; called by Serve."""
        self._silent_until: dict[Any, float] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first."""
        now = time.monotonic()
        self._turn += 1  # Serve takes the first of equally busy ones
        at = self._turn % max(1, len(candidate_replicas))
        candidate_replicas = candidate_replicas[at:] + candidate_replicas[:at]
        if _was_lost(pending_request):
            self._probe_until = now + _PROBING_S
        if now >= self._probe_until or len(candidate_replicas) < 2:
            return [candidate_replicas]
        silent = {key: at for key, at in self._silent_until.items() if at > now}
        probed = [r for r in candidate_replicas if r.replica_id not in silent]
        answers = await asyncio.gather(*map(_probe, probed))
        awake = [replica for replica, answered in zip(probed, answers, strict=True) if answered]
        last = [replica for replica in candidate_replicas if replica not in awake]
        if last:
            now = time.monotonic()
            self._probe_until = now + _PROBING_S
            fresh = {r.replica_id: now + _SILENT_S for r in last if r.replica_id not in silent}
            self._silent_until = silent | fresh
        return [*_ranked(awake, _failed_on(pending_request)), last]


def _was_lost(pending: PendingRequest | None) -> bool:
    if pending is None:
        return False
    first = pending.args[0] if pending.args else None
    return bool(getattr(first, "attempt", pending.kwargs.get("attempt", 0)) > 0)


def _failed_on(pending: PendingRequest | None) -> tuple[str, ...]:
    first = pending.args[0] if pending is not None and pending.args else None
    return getattr(first, "failed_on", ())


def _ranked(awake: list[RunningReplica], failed_on: tuple[str, ...]) -> list[list[RunningReplica]]:
    """Rank those that did not fail before those that did, the latest last."""
    ranks = [[r for r in awake if r.replica_id.unique_id not in failed_on]]
    for name in failed_on:
        ranks.append([r for r in awake if r.replica_id.unique_id == name])
    return [rank for rank in ranks if rank]


async def _probe(replica: RunningReplica) -> bool:
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            await replica.get_queue_len(deadline_s=_PROBE_TIMEOUT_S)
    except (TimeoutError, RayError):
        return False
    return True
