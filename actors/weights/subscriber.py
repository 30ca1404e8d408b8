"""The subscriber of the registry: a thread that long-polls it for topics and weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import ray

from paceline.actors.backoff import Backoff
from paceline.actors.handles import Reference, remote_method
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.notifications import RegistryChanges, SlotWeights
from paceline.actors.weights.slots import candidate_of, expert_of
from paceline.actors.weights.topics import TopicsView

if TYPE_CHECKING:  # subscribers to topics alone do without torch
    from torch import Tensor

    from paceline.actors.weights.registry import WeightRegistry

logger = logging.getLogger(__name__)

_POLL_S = 10.0
_FIRST_RETRY_S = 0.5
_MAX_RETRY_S = 4.0
_STEP_S = 0.5

T = TypeVar("T")


class RegistryHandle:
    """Actor handle of a WeightRegistry."""

    if TYPE_CHECKING:
        publish = remote_method(WeightRegistry.publish)
        reject = remote_method(WeightRegistry.reject)
        record_decision = remote_method(WeightRegistry.record_decision)
        report = remote_method(WeightRegistry.report)
        roll_back = remote_method(WeightRegistry.roll_back)
        add_topic = remote_method(WeightRegistry.add_topic)
        register_actors = remote_method(WeightRegistry.register_actors)
        topics = remote_method(WeightRegistry.topics)
        topic_status = remote_method(WeightRegistry.topic_status)
        stable_versions = remote_method(WeightRegistry.stable_versions)
        stable_weights = remote_method(WeightRegistry.stable_weights)
        wait_for_changes = remote_method(WeightRegistry.wait_for_changes)
        history = remote_method(WeightRegistry.history)
        ping = remote_method(WeightRegistry.ping)


LoadWeights = Callable[[str, int, "Mapping[str, Tensor] | None"], object]
"""Takes a slot, its weight_version and its weights by name; None: there is no candidate now."""


class RegistrySubscriber:
    """Applies the registry's changes through callbacks, topics before their weights.

    The registry may be dead or slow at any time: everything then stays as it is, and the
    subscriber retries with exponential backoff. A change is repeated until its callback returns.
    """

    def __init__(
        self,
        registry: RegistryHandle,
        *,
        on_topics: Callable[[TopicsView], object] | None = None,
        on_weights: LoadWeights | None = None,
        expert: str | None = None,
        failed: Callable[[], Iterable[DraftOutcome]] = tuple,
        name: str | None = None,
    ) -> None:
        """Subscribe; :meth:`start` begins to poll.

        Args:
            registry: actor handle of the weight registry.
            on_topics: applies the added topics; None ignores them.
            on_weights: loads weights; None ignores them.
            expert: whose weights alone are loaded; None: those of all experts.
            failed: outcomes of candidates that failed here. They are reported until the
                registry has withdrawn these candidates: a report may get lost, and nothing else
                ends a candidate that no request drafts with.
            name: under which the registry reports what has been loaded here.
        """
        self._name = name
        self._registry = registry
        self._on_topics = on_topics
        self._on_weights = on_weights
        self._expert = expert
        self._failed = failed
        self._etag = None if on_topics is None else ""
        self._versions: dict[str, int] | None = None if on_weights is None else {}  # by slot
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-registry", daemon=True)

    def start(self) -> None:
        """Poll in a thread until :meth:`stop`, or for ever."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop polling and wait for a running callback, at most ``timeout_s`` seconds."""
        self._stopped.set()
        self._thread.join(timeout_s)

    def poll(self, wait_s: float = _POLL_S, timeout_s: float = 3 * _POLL_S) -> bool:
        """Apply the changes of the next ``wait_s`` seconds; False if anything failed.

        Args:
            wait_s: the registry answers after so long without changes.
            timeout_s: longest wait for its answer, and for each slot's weights.
        """
        try:
            asked = self._registry.wait_for_changes.remote(
                self._versions, self._etag, wait_s, self._name, self._expert
            )
            self._apply(self.get(asked, timeout_s), timeout_s)
            versions = self._versions or {}
            failed = [
                outcome
                for outcome in self._failed()
                if versions.get(candidate_of(outcome.expert)) == outcome.weight_version
            ]
            if failed:
                self._registry.report.remote(failed)
        except Exception as error:
            if not self._stopped.is_set():
                logger.info("no changes from the registry (%r), trying again", error)
            return False
        return True

    def get(self, reference: Reference[T], timeout_s: float) -> T:
        """The value of a reference, awaited in short steps.

        Ray must not shut down while a thread waits in it.

        Raises:
            TimeoutError: it is not there in time, or the subscriber was stopped.
        """
        deadline = time.monotonic() + timeout_s
        while not self._stopped.is_set():
            step_s = min(_STEP_S, deadline - time.monotonic())
            if ray.wait([reference], timeout=max(step_s, 0.0))[0]:
                value: T = ray.get(reference)
                return value
            if step_s <= 0.0:
                break
        raise TimeoutError("the registry does not answer")

    def _apply(self, changes: RegistryChanges, timeout_s: float) -> None:
        try:
            if changes.topics is not None and self._on_topics is not None:
                self._on_topics(changes.topics)
                self._etag = changes.topics.etag
        finally:  # a topic that cannot be applied must not hold up other experts' weights
            for slot, weights in changes.weights.items():
                self._load(slot, weights, timeout_s)

    def _load(self, slot: str, weights: SlotWeights, timeout_s: float) -> None:
        assert self._versions is not None
        assert self._on_weights is not None
        if self._expert in (None, expert_of(slot)):
            state = None
            if weights.reference is not None:
                from paceline.actors.weights.flat_weights import unflatten  # imports torch

                # unflatten copies: the object dies with the registry that put it
                state = unflatten(self.get(weights.reference, timeout_s))
            self._on_weights(slot, weights.weight_version, state)
        self._versions[slot] = weights.weight_version

    def _run(self) -> None:
        backoff = Backoff(_FIRST_RETRY_S, _MAX_RETRY_S)
        while not self._stopped.is_set():
            if self.poll():
                backoff.reset()
            else:
                self._stopped.wait(backoff.fail())
