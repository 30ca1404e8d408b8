"""The ingress' deployment class: exports metrics.

No ``from __future__ import annotations`` here: FastAPI and Ray read the annotations.
"""

import time
from typing import Any

from fastapi import FastAPI
from ray.serve import metrics

from paceline.actors.engine.stats import drain
from paceline.deploy.api.ingress import Ingress
from paceline.deploy.monitoring.exporter import Exporter, RaySink
from paceline.deploy.monitoring.outcomes import OutcomeMiddleware, Outcomes
from paceline.deploy.monitoring.samples import IngressStats, ingress_samples


class MeteredIngress(Ingress):
    """An ingress that exports metrics."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._outcomes = Outcomes(time.monotonic)
        sink = RaySink(metrics)
        self._exporter = Exporter(lambda: ingress_samples(self.stats()), sink).start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The routes of Ingress with requests counted by outcome."""
        api = super().__serve_build_asgi_app__()
        api.add_middleware(OutcomeMiddleware, outcomes=self._outcomes)
        return api

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
