"""Which target replica gets a request: the least busy one, and none that may hang.

Serve's own choice goes by what it remembers of the replicas' queues, and a stopped process looks
idle in it once the requests that it swallowed have been taken back.
"""

import asyncio
import time
from typing import Any

from ray.exceptions import RayError
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

_DISTRUST_S = 60.0
_ANSWER_S = 1.0
_SILENT_S = 5.0


class ReplicaChoice(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Serve is untyped
    """Serve's least busy replica; for a minute after a request came back, of those that answer.

    A request that comes with an ``attempt`` above 0 has lost a replica. From then on every choice
    asks the replicas first; those that do not answer within a second are the last resort, and
    are not asked again for some seconds. Before them come, for this request alone, those that
    told it that they failed (``failed_on``): idle again, they would draw it back. (Where several
    wait at once, Serve may give a choice to the one that waits longest. The mixin is needed: the
    choices of one client request share the id by which Serve would tell them apart without it.)
    """

    _distrust_until = 0.0
    _turn = 0

    def initialize_state(self, **_options: Any) -> None:
        """Begin with trust in everybody; Serve calls it."""
        self._silent_until: dict[Any, float] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first; Serve takes the least busy of a rank."""
        now = time.monotonic()
        self._turn += 1  # Serve takes the first of those that are equally busy
        at = self._turn % max(1, len(candidate_replicas))
        candidate_replicas = candidate_replicas[at:] + candidate_replicas[:at]
        if _was_lost(pending_request):
            self._distrust_until = now + _DISTRUST_S
        if now >= self._distrust_until or len(candidate_replicas) < 2:
            return [candidate_replicas]
        silent = {key: at for key, at in self._silent_until.items() if at > now}
        asked = [r for r in candidate_replicas if r.replica_id not in silent]
        answers = await asyncio.gather(*map(_answers, asked))
        awake = [replica for replica, answered in zip(asked, answers, strict=True) if answered]
        last = [replica for replica in candidate_replicas if replica not in awake]
        if last:
            now = time.monotonic()
            self._distrust_until = now + _DISTRUST_S
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
    """Those that did not fail, then those that did, the latest last."""
    ranks = [[r for r in awake if r.replica_id.unique_id not in failed_on]]
    for name in failed_on:
        ranks.append([r for r in awake if r.replica_id.unique_id == name])
    return [rank for rank in ranks if rank]


async def _answers(replica: RunningReplica) -> bool:
    try:
        async with asyncio.timeout(_ANSWER_S):
            await replica.get_queue_len(deadline_s=_ANSWER_S)
    except (TimeoutError, RayError):
        return False
    return True
