"""Admission of requests: limits of concurrent sequences, and draining."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from paceline.cluster.scheduler.trainer_scheduler import TrainerSchedulerHandle
from paceline.deploy.api.actor_calls import BackgroundPoller
from paceline.deploy.errors import ApiError, overloaded, rate_limited

_POLL_INTERVAL_S = 0.5
_TIMEOUT_S = 5.0
_DRAIN_RETRY_AFTER_S = 5


class ConcurrencyLimiter:
    """Limits concurrent sequences, in total and per client.

    Args:
        limit: of all sequences.
        per_client: of one client's; None for ``limit``.
    """

    def __init__(self, limit: int, per_client: int | None = None) -> None:
        self.resize(limit, per_client)
        self._running: Counter[str] = Counter()  # sequences by client

    def resize(self, limit: int, per_client: int | None = None) -> None:
        """Change the limits; what runs goes on."""
        self._limit = limit
        self._per_client = limit if per_client is None else min(limit, per_client)

    @property
    def running(self) -> int:
        """Sequences that are admitted and not released."""
        return self._running.total()

    def acquire(self, count: int, client: str = "", param: str = "prompt") -> Callable[[], None]:
        """Admit a request; call the result to release it, more than once if need be.

        Args:
            count: sequences of the request.
            client: see `client_key`.
            param: the request field that determines the count.

        Raises:
            ApiError: 503 or, for the client's limit, 429 with Retry-After; 400 if the request
                can never be admitted.
        """
        if count > self._per_client:
            text = f"{param}: at most {self._per_client} answers at once"
            raise ApiError(400, text, param=param, code="invalid_value")
        if self.running + count > self._limit:
            raise overloaded("The server is overloaded; try again.")
        if self._running[client] + count > self._per_client:
            raise rate_limited("Too many of your requests are under way; try again.")
        self._running[client] += count
        acquired = [count]

        def release() -> None:
            if not acquired:
                return
            self._running[client] -= acquired.pop()
            if not self._running[client]:
                del self._running[client]

        return release


class DrainState:
    """An ingress replica's copy of the trainer scheduler's drain switch.

    Running requests finish, new ones are refused. If the scheduler is dead the replicas keep the
    last state; a restarted one is not draining until ``paceline drain`` sets it again.

    Args:
        scheduler: actor handle of the trainer scheduler.
    """

    def __init__(self, scheduler: TrainerSchedulerHandle) -> None:
        self._scheduler = scheduler
        self._poller = BackgroundPoller(
            self._poll, timeout_s=_TIMEOUT_S, interval_s=_POLL_INTERVAL_S, name="trainer scheduler"
        )
        self.draining = False

    def ensure_polling(self) -> None:
        """Poll the scheduler in the background; needs a running loop."""
        self._poller.ensure_started()

    def check(self) -> None:
        """Refuse a new request while draining.

        Raises:
            ApiError: 503 with Retry-After.
        """
        if self.draining:
            raise ApiError(
                503,
                "The server is being drained: it finishes what is under way and takes nothing new.",
                "server_error",
                code="draining",
                retry_after_s=_DRAIN_RETRY_AFTER_S,
            )

    async def refresh(self) -> None:
        """Poll the scheduler now."""
        await self._poller.poll_once()

    async def _poll(self) -> None:
        self.draining = (await self._scheduler.status.remote()).draining
