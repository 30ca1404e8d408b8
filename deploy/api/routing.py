"""Choose topic and expert of a prompt, by the router and by measured acceptance."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from paceline.actors.engine.request import GenerationChunk, GenerationRequest
from paceline.actors.handles import remote_method
from paceline.actors.replay.shard import ShardHandle
from paceline.actors.router.key_scope import key_route
from paceline.actors.router.policy import MinConfidence, Route, route
from paceline.actors.training.scorer import ScorerHandle
from paceline.actors.weights.slots import in_canary
from paceline.actors.weights.subscriber import RegistryHandle, RegistrySubscriber
from paceline.actors.weights.topics import TopicsView
from paceline.deploy.api.actor_calls import BackgroundPoller, call_with_timeout

if TYPE_CHECKING:  # imports torch: seconds
    from paceline.actors.router.router import TopicRouter

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_TABLE_INTERVAL_S = 3.0
_TABLE_TIMEOUT_S = 2.0
_TABLE_MAX_AGE_S = 300.0
_MAX_LATENCIES = 4096

Weights = Mapping[str, Mapping[str, float]]  # topic to expert to weight


class RouterHandle:
    """Serve handle of a TopicRouter."""

    if TYPE_CHECKING:
        classify = remote_method(TopicRouter.classify)
        labels = remote_method(TopicRouter.labels)
        fit_topic = remote_method(TopicRouter.fit_topic)


@dataclass(frozen=True, slots=True)
class _LocalMethod(Generic[P, T]):
    """A method in this process with the interface of a Serve handle's method."""

    remote: Callable[P, Awaitable[T]]


class InProcessRouter(RouterHandle):
    """A TopicRouter in this process with the interface of a Serve handle.

    A slow classifier runs on its own thread and so meets the same timeout and circuit breaker as
    a deployment; arguments are shared, not copied.

    Attributes:
        classify: see TopicRouter, as the others.
        labels: likewise.
        fit_topic: likewise; takes seconds of a thread.
    """

    def __init__(self, router: TopicRouter) -> None:
        self.classify = _LocalMethod(router.classify)
        self.labels = _LocalMethod(router.labels)
        self.fit_topic = _LocalMethod(router.fit_topic)


def load_router(
    path: str, encoder_path: str | None, num_threads: int, registry: RegistryHandle
) -> InProcessRouter:
    """Load the topic classifier into this process; see TopicRouter.

    Raises:
        FileNotFoundError: a folder holds no model.
        ValueError: the head was fitted on another encoder.
    """
    from paceline.actors.router.router import TopicRouter  # torch: seconds

    return InProcessRouter(TopicRouter(path, encoder_path, num_threads, registry))


class ExpertList(Collection[str]):
    """The experts: those of the configuration and those added since.

    Subscribes to the weight registry. Thread-safe.

    Attributes:
        view: the registry's last view of the added topics.
    """

    def __init__(self, experts: Sequence[str], registry: RegistryHandle) -> None:
        self._experts = tuple(experts)
        self._lock = threading.Lock()
        self.view = TopicsView(etag="")
        RegistrySubscriber(registry, on_topics=self.update).start()

    def __contains__(self, name: object) -> bool:
        return name in self._experts

    def __iter__(self) -> Iterator[str]:
        return iter(self._experts)

    def __len__(self) -> int:
        return len(self._experts)

    @property
    def shards(self) -> dict[str, ShardHandle]:
        """Handles of the added topics' replay shards, as far as they are known."""
        return {name: actors.shard for name, actors in self.view.actors.items()}

    def update(self, view: TopicsView) -> None:
        """Add the topics of a view; experts are never removed."""
        with self._lock:
            new = [topic.name for topic in view.topics if topic.name not in self._experts]
            self._experts = (*self._experts, *new)
            self.view = view


class RoutingTable:
    """Weights of experts by measured acceptance, polled from the scorer in the background.

    Args:
        scorer: actor handle, or None.
        clock: monotonic seconds.
        canary_share: share of the requests that an expert's candidate drafts for.
        interval_s: between two polls.
        max_age_s: without a successful poll for so long, the table is dropped: the experts may
            have changed.
    """

    def __init__(
        self,
        scorer: ScorerHandle | None,
        clock: Callable[[], float],
        canary_share: float = 0.0,
        *,
        interval_s: float = _TABLE_INTERVAL_S,
        max_age_s: float = _TABLE_MAX_AGE_S,
    ) -> None:
        self._scorer = scorer
        self._clock = clock
        self._canary_share = canary_share
        self._max_age_s = max_age_s
        self._poller = BackgroundPoller(
            self._poll, timeout_s=_TABLE_TIMEOUT_S, interval_s=interval_s, name="routing table"
        )
        self._weights: Weights | None = None
        self._with_candidate: frozenset[str] = frozenset()
        self._polled_at = 0.0

    def weights(self) -> Weights | None:
        """Weights by topic and expert, None if unknown; needs a running loop."""
        if self._scorer is None:
            return None
        self._poller.ensure_started()
        return None if self._clock() - self._polled_at > self._max_age_s else self._weights

    def canary_route(self, route: Route, request_id: str) -> Route:
        """The route of a request, see :func:`canary_route`."""
        return canary_route(route, request_id, self._with_candidate, self._canary_share)

    async def _poll(self) -> None:
        assert self._scorer is not None
        table = await self._scorer.table.remote()
        self._weights = {} if table is None else table.weights
        self._with_candidate = frozenset() if table is None else frozenset(table.on_trial)
        self._polled_at = self._clock()


def canary_route(
    route: Route, request_id: str, with_candidate: Collection[str], canary_share: float
) -> Route:
    """Route some requests to the topic's own expert while that has a candidate.

    Without them an expert that lost its topic's requests to another would never get the traffic
    that decides about its candidate. It gets twice the canary share: one half drafts with the
    candidate, the other with the stable weights.

    Args:
        route: by weights.
        request_id: the target splits requests by it in the same way.
        with_candidate: experts with a candidate.
        canary_share: share of the requests that a candidate drafts for, in [0, 1].
    """
    if route.draft == route.topic or route.topic not in with_candidate:
        return route
    is_canary = in_canary(route.topic, request_id, 2 * canary_share)
    return replace(route, draft=route.topic) if is_canary else route


class RouterCircuitBreaker:
    """A circuit breaker: a dead or hung router costs a timeout per back-off, not per request.

    The first failure opens it for a back-off. Then one request at a time may try; a success
    closes it, a failure doubles the back-off. Times are monotonic seconds.
    """

    def __init__(self, initial_backoff_s: float = 0.5, max_backoff_s: float = 30.0) -> None:
        self._initial_backoff_s = initial_backoff_s
        self._max_backoff_s = max_backoff_s
        self._backoff_s = 0.0  # 0 while closed
        self._opened_at = 0.0
        self._half_open = False

    @property
    def closed(self) -> bool:
        """Whether every request is allowed."""
        return self._backoff_s == 0.0

    def allow(self, now: float) -> bool:
        """Whether a request may call the router; its result must be recorded."""
        if self.closed:
            return True
        if self._half_open or now < self._opened_at + self._backoff_s:
            return False
        self._half_open = True
        return True

    def record_success(self) -> None:
        """Close the circuit."""
        self._backoff_s, self._half_open = 0.0, False

    def record_failure(self, called_at: float, now: float) -> None:
        """Open the circuit; concurrent failures count once.

        Args:
            called_at: time of the call that failed.
            now: monotonic seconds.
        """
        if not self.closed and called_at < self._opened_at:
            return
        doubled = max(2.0 * self._backoff_s, self._initial_backoff_s)
        self._backoff_s = min(doubled, self._max_backoff_s)
        self._opened_at, self._half_open = now, False

    def record_cancelled(self) -> None:
        """The client disconnected during the call, which says nothing about the router."""
        self._half_open = False


_FEW = 3  # sequences in flight
_ROUTED_EVERY_S = 1.0  # as often as a busy replica hands over a record
_DRAFTED_SHARE = 1 / 16  # of rounds; drafts that are only probed take part in fewer
_MEASURED_TOKENS = 4096  # of routed prompts' answers
_LIMITED_TOKENS = 32_768  # of all answers, until drafts are measured again


class RoutingRateLimiter:
    """Limits routing to one prompt a second and key under load at which drafts are off.

    Routing takes several milliseconds of a core, which decoding needs. It pays if the topic's own
    draft is used, or for the record. With more than a few sequences in flight it measures, while
    all prompts are routed, whether drafts of models take part in rounds. If next to none do,
    because they would cost more than they gain, other prompts are neither routed nor recorded for
    replay until it measures again: meanwhile drafts may have learnt. Pure but for its clock.
    """

    def __init__(self, running: Callable[[], int], clock: Callable[[], float]) -> None:
        """Begin to measure.

        Args:
            running: number of sequences in flight, that of the present prompt included.
            clock: monotonic seconds.
        """
        self._running = running
        self._clock = clock
        self._routed_at: dict[str, float] = {}
        self._limited = False
        self._tokens = 0  # since it began to measure, or to limit
        self._drafted = self._plain = 0  # rounds with drafts of models, and with none

    def observe(self, request: GenerationRequest, chunk: GenerationChunk) -> None:
        """Count a chunk of a request that may use drafts."""
        if self._running() <= _FEW or not (self._limited or request.replayed):
            return
        self._tokens += len(chunk.token_ids)
        of_drafts = sum(1 + accepted for _, accepted in (*chunk.rounds, *chunk.suffix_rounds))
        self._drafted += len(chunk.rounds)
        self._plain += max(len(chunk.token_ids) - of_drafts, 0)
        if self._tokens >= (_LIMITED_TOKENS if self._limited else _MEASURED_TOKENS):
            few = self._drafted < _DRAFTED_SHARE * (self._drafted + self._plain)
            self._limited = few and not self._limited
            self._tokens = self._drafted = self._plain = 0

    def allow(self, key: str, *, recorded: bool) -> bool:
        """Whether to route the next prompt.

        Args:
            key: see RouteSelector.select.
            recorded: whether it would be recorded; else it is of no use while drafts are off.
        """
        if self._running() <= _FEW or not self._limited:
            return True
        now = self._clock()
        if not recorded or now - self._routed_at.get(key, -math.inf) < _ROUTED_EVERY_S:
            return False
        self._routed_at[key] = now
        return True


class RouteSelector:
    """Selects routes with the router, behind a timeout and a circuit breaker.

    A late, failed or unsure router means ``general``.

    Args:
        router: Serve handle, or InProcessRouter; None for ``general`` always.
        experts: all experts; may grow.
        timeout_s: of the router, seconds.
        min_confidence: see `policy.choose_topic`.
        clock: monotonic seconds.
        weights: gives the weights by topic and expert, None while they are unknown.

    Attributes:
        calls: of the router by outcome: ``answered``, ``late``, ``failed``, or ``skipped`` while
            the circuit is open, and ``limited`` by RoutingRateLimiter.
        latencies: seconds of the latest answered calls; readers remove them.
    """

    def __init__(
        self,
        router: RouterHandle | None,
        experts: Collection[str],
        timeout_s: float,
        min_confidence: MinConfidence,
        clock: Callable[[], float],
        weights: Callable[[], Weights | None] = lambda: None,
    ) -> None:
        self._router = router
        self._experts = experts
        self._timeout_s = timeout_s
        self._min_confidence = min_confidence
        self._clock = clock
        self._circuit = RouterCircuitBreaker()
        self._weights = weights
        self._counts: Counter[Route] = Counter()
        self.calls: Counter[str] = Counter()
        self.latencies: deque[float] = deque(maxlen=_MAX_LATENCIES)

    def configure(self, timeout_s: float, min_confidence: MinConfidence) -> None:
        """Change the router's timeout and confidence."""
        self._timeout_s = timeout_s
        self._min_confidence = min_confidence

    def counts(self) -> dict[str, dict[str, int]]:
        """Selected routes by topic and expert."""
        counts: dict[str, dict[str, int]] = {}
        for selected, count in list(self._counts.items()):
            drafts = counts.setdefault(selected.topic, {})
            drafts[selected.draft] = drafts.get(selected.draft, 0) + count
        return counts

    async def select(self, text: str | None, key: str = "") -> Route:
        """Topic and expert of a prompt, ``general`` in doubt.

        Args:
            text: of the prompt; None for one beyond the limit.
            key: whose topics and experts they are to be; empty for those of no key.
        """
        is_limited = text is None and self._router is not None
        if is_limited:
            self.calls["limited"] += 1
        probabilities = {} if text is None else await self._classify(text)
        known = (probabilities, self._experts, self._min_confidence, self._weights())
        selected = key_route(key, *known) if key else route(*known)
        selected = replace(selected, classified=not is_limited)
        self._counts[selected] += 1
        return selected

    async def _classify(self, text: str) -> dict[str, float]:
        """Probabilities by topic; empty if the router does not answer in time."""
        called_at = self._clock()
        if self._router is None:
            return {}
        if not self._circuit.allow(called_at):
            self.calls["skipped"] += 1
            return {}
        try:
            call = partial(self._router.classify.remote, text)
            probabilities = await call_with_timeout(call, self._timeout_s)
            if not all(map(math.isfinite, probabilities.values())):
                raise ValueError(f"probabilities are not finite: {probabilities}")
        except asyncio.CancelledError:
            self._circuit.record_cancelled()
            raise
        except Exception as error:  # a router failure must not fail the request
            self.calls["late" if isinstance(error, TimeoutError) else "failed"] += 1
            if self._circuit.closed:
                logger.warning("the router fails (%r), requests go to general meanwhile", error)
            self._circuit.record_failure(called_at, self._clock())
            return {}
        self.calls["answered"] += 1
        self.latencies.append(self._clock() - called_at)
        self._circuit.record_success()
        return probabilities
