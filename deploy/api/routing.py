"""Find a request's topic, by the router within a time box, and the expert that drafts for it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.actors.router.policy import LeastConfidence, Route, route
from paceline.actors.weights.slots import in_canary


@dataclass(frozen=True, slots=True)
class Method:
    """A method with the face of a Serve handle's."""

    remote: Callable[..., Awaitable[Any]]


class RouterHere:
    """What front door and topic admin ask of a router's Serve handle, without the way there.

    A classifier that takes long runs on a thread of its own, so that a slow one meets the same time
    box and circuit, as a failing one does anyway; arguments are shared, not copied.

    Attributes:
        classify: see TopicRouter, as the others.
        labels: likewise.
        grow: likewise; seconds of a thread that classifications share the processor with.
    """

    def __init__(self, router: Any) -> None:
        """Take a TopicRouter."""
        self.classify = Method(router.classify)
        self.labels = Method(router.labels)
        self.grow = Method(router.grow)


def load_router(path: str, num_threads: int, registry: Any) -> RouterHere:
    """Load the classifier into this process; see TopicRouter.

    Raises:
        FileNotFoundError: the folder holds no model.
    """
    from paceline.actors.router.router import TopicRouter  # torch: seconds

    return RouterHere(TopicRouter(path, num_threads, registry))


logger = logging.getLogger(__name__)

_EVERY_S = 3.0
_TIMEOUT_S = 2.0
_STALE_AFTER_S = 300.0


class RouteTable:
    """Follows the scorer in the background: no request waits for it or notices its death.

    A table that has not been confirmed for minutes is given up: experts may be others by now.
    """

    def __init__(
        self,
        scorer: Any,
        clock: Callable[[], float],
        trial_share: float = 0.0,
        *,
        every_s: float = _EVERY_S,
        stale_after_s: float = _STALE_AFTER_S,
    ) -> None:
        """Ask nothing yet.

        Args:
            scorer: actor handle; None: nothing is ever known.
            clock: monotonic seconds.
            trial_share: of the requests, which an expert's candidate drafts for.
            every_s: between two questions.
            stale_after_s: without an answer, the table counts no more.
        """
        self._scorer = scorer
        self._clock = clock
        self._every_s = every_s
        self._stale_after_s = stale_after_s
        self._trial_share = trial_share
        self._weights: dict[str, dict[str, float]] | None = None
        self._on_trial: frozenset[str] = frozenset()
        self._answered_at = 0.0
        self._following: asyncio.Task[None] | None = None

    def weights(self) -> dict[str, dict[str, float]] | None:
        """Weights by topic and expert, None where they are not known; call it in a running loop."""
        if self._scorer is None:
            return None
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        stale = self._clock() - self._answered_at > self._stale_after_s
        return None if stale else self._weights

    def for_trial(self, route: Route, request_id: str) -> Route:
        """The route that a request takes; see :func:`tried`."""
        return tried(route, request_id, self._on_trial, self._trial_share)

    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    table = await self._scorer.table.remote()
                self._weights, self._on_trial = _read(table), _on_trial(table)
                self._answered_at = self._clock()
            except Exception as error:
                logger.info("no routing table (%r), the last one is kept for a while", error)
            await asyncio.sleep(self._every_s)


def tried(route: Route, request_id: str, on_trial: Collection[str], share: float) -> Route:
    """The route, or where a trial of the topic's own expert needs the request, that expert's.

    An expert that measured acceptance has taken its topic's requests from would get none to judge
    its candidate by, and so never come back. While it has a candidate, twice the trial's share goes
    to it: one half drafts with the candidate, the other with the stable weights.

    Args:
        route: by weights.
        request_id: by which the target splits the same way.
        on_trial: experts with a candidate.
        share: of the requests that a candidate drafts for, in [0, 1].
    """
    if route.draft == route.topic or route.topic not in on_trial:
        return route
    taken = in_canary(route.topic, request_id, 2 * share)
    return replace(route, draft=route.topic) if taken else route


def _on_trial(table: dict[str, Any]) -> frozenset[str]:
    return frozenset(map(str, table.get("on_trial", ())))


def _read(table: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        str(topic): {str(expert): float(weight) for expert, weight in row.items()}
        for topic, row in table.get("weights", {}).items()
    }


Weights = Mapping[str, Mapping[str, float]]
NOTHING_KNOWN: dict[str, float] = {}
_MOST_LATENCIES = 4096  # that nobody has taken; the oldest go


class RouterCircuit:
    """Whether to ask the router: a dead or hung one costs a time box now and then, no more.

    Closed, every request asks. The first failure opens it for a back-off; after that one request
    asks, alone, and its answer closes the circuit or doubles the back-off.
    """

    def __init__(self, first_wait_s: float = 0.5, longest_wait_s: float = 30.0) -> None:
        """Start closed, with the back-off's first and longest seconds."""
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s
        self._wait_s = 0.0  # 0: closed
        self._opened_at = 0.0
        self._trying = False

    @property
    def closed(self) -> bool:
        """True where every request asks."""
        return self._wait_s == 0.0

    def ask(self, now: float) -> bool:
        """Whether a request may ask; what comes of it must be told.

        Args:
            now: monotonic seconds.
        """
        if self.closed:
            return True
        if self._trying or now < self._opened_at + self._wait_s:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        """The router has answered, however late it was asked."""
        self._wait_s, self._trying = 0.0, False

    def failed(self, asked_at: float, now: float) -> None:
        """The router has not answered a request.

        Args:
            asked_at: when :meth:`ask` let it; failures of those that asked together count once.
            now: monotonic seconds.
        """
        if not self.closed and asked_at < self._opened_at:
            return
        self._wait_s = min(max(2.0 * self._wait_s, self._first_wait_s), self._longest_wait_s)
        self._opened_at, self._trying = now, False

    def gave_up(self) -> None:
        """The client of a request that asked has gone: nothing is learnt of the router."""
        self._trying = False


class TopicFinder:
    """The router behind a time box and a circuit: late, failed or unsure means ``general``.

    Attributes:
        asked: questions by what came of them: ``answered``, ``late``, ``failed``, or ``skipped``
            because the circuit is open.
        latencies: seconds that the latest answers took; whoever reads them takes them out.
    """

    def __init__(
        self,
        router: Any,
        experts: Collection[str],
        timeout_s: float,
        min_confidence: LeastConfidence,
        clock: Callable[[], float],
        weights: Callable[[], Weights | None] = lambda: None,
    ) -> None:
        """Remember the router's handle and the rules.

        Args:
            router: Serve handle, or RouterHere; None: every request is ``general``.
            experts: all that there are; may grow.
            timeout_s: the time box, seconds.
            min_confidence: see `policy.choose`.
            clock: monotonic seconds.
            weights: measured weights by topic and expert, as far as they are known now.
        """
        self._router = router
        self._experts = experts
        self._timeout_s = timeout_s
        self._min_confidence = min_confidence
        self._clock = clock
        self._circuit = RouterCircuit()
        self._weights = weights
        self._counts: Counter[Route] = Counter()
        self.asked: Counter[str] = Counter()
        self.latencies: deque[float] = deque(maxlen=_MOST_LATENCIES)

    def retune(self, timeout_s: float, min_confidence: LeastConfidence) -> None:
        """Other rules from the next request on; see the constructor."""
        self._timeout_s = timeout_s
        self._min_confidence = min_confidence

    def counts(self) -> dict[str, dict[str, int]]:
        """Requests that were routed, by topic and expert."""
        counts: dict[str, dict[str, int]] = {}
        for found, number in list(self._counts.items()):
            counts.setdefault(found.topic, {})[found.draft] = number
        return counts

    async def find(self, text: str) -> Route:
        """Topic and expert of a text, ``general`` in doubt."""
        probabilities = await self._classify(text)
        found = route(probabilities, self._experts, self._min_confidence, self._weights())
        self._counts[found] += 1
        return found

    async def _classify(self, text: str) -> dict[str, float]:
        """Probabilities by topic; none where the router does not tell in time."""
        asked_at = self._clock()
        if self._router is None:
            return NOTHING_KNOWN
        if not self._circuit.ask(asked_at):
            self.asked["skipped"] += 1
            return NOTHING_KNOWN
        try:
            async with asyncio.timeout(self._timeout_s):
                probabilities: dict[str, float] = await self._router.classify.remote(text)
            if not all(map(math.isfinite, probabilities.values())):
                raise ValueError(f"probabilities are broken: {probabilities}")
        except asyncio.CancelledError:
            self._circuit.gave_up()
            raise
        except Exception as error:  # a router must never cost an answer
            self.asked["late" if isinstance(error, TimeoutError) else "failed"] += 1
            if self._circuit.closed:
                logger.warning("the router fails (%r), requests go to general meanwhile", error)
            self._circuit.failed(asked_at, self._clock())
            return NOTHING_KNOWN
        self.asked["answered"] += 1
        self.latencies.append(self._clock() - asked_at)
        self._circuit.succeeded()
        return probabilities
