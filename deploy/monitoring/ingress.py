"""The ingress' deployment class: listens and exports metrics.

No ``from __future__ import annotations`` here: FastAPI and Ray read the annotations.
"""

import time
from typing import Any

from fastapi import FastAPI
from ray.serve import metrics

from paceline.actors.engine.stats import drain
from paceline.deploy.api.ingress import Ingress
from paceline.deploy.api.listener import Listener, listening_socket
from paceline.deploy.monitoring.exporter import Exporter, RaySink
from paceline.deploy.monitoring.outcomes import OutcomeMiddleware, Outcomes
from paceline.deploy.monitoring.samples import IngressStats, ingress_samples


class MeteredIngress(Ingress):
    """An ingress that listens on a port and exports metrics.

    Args:
        port: to listen on, see ``listening_socket``.
        args: of Ingress.

    Raises:
        StartError: it cannot listen on the port.
    """

    def __init__(self, port: str | tuple[str, int], *args: Any) -> None:
        super().__init__(*args)
        self._outcomes = Outcomes(time.monotonic)
        sink = RaySink(metrics)
        self._exporter = Exporter(lambda: ingress_samples(self.stats()), sink).start()
        self._listener = Listener(self.api(), listening_socket(port))

    def api(self) -> FastAPI:
        """The routes of Ingress with requests counted by outcome."""
        api = super().api()
        api.add_middleware(OutcomeMiddleware, outcomes=self._outcomes)
        return api

    def check_health(self) -> None:
        """Raise if it does not listen; Serve, which calls it, then replaces the replica."""
        if not self._listener.alive:
            raise RuntimeError("the listener has ended")

    async def __del__(self) -> None:
        """Finish the open requests; Serve calls it and waits for as long as the drain timeout."""
        await self._listener.close()

    def stats(self) -> IngressStats:
        """Counts of this replica; removes the latencies it returns. Thread-safe for one reader."""
        return IngressStats(
            outcomes=dict(self._outcomes.counts),
            latencies=drain(self._outcomes.latencies),
            in_flight=self._limiter.running,
            router=dict(self._route_selector.calls),
            router_latencies=drain(self._route_selector.latencies),
            routed=self._route_selector.counts(),
            failovers=self._failover.counts(),
        )
