"""The weight registry: owns, publishes and versions the weights of all drafts.

A *weight_version* is an integer per topic: 0 are the initial weights, which every process loads
from disk, then 1, 2, ... The number never falls, not even when the registry is killed.

A topic has a stable version and at most one candidate. With a canary, new weights become the
candidate, and live requests decide whether it is promoted or rolled back (``canary.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import ray

from paceline.actors.handles import Reference
from paceline.actors.weights.canary import (
    CanaryAction,
    CanaryInstruction,
    CanaryMonitor,
    CanarySettings,
)
from paceline.actors.weights.cooldown import MANUAL, CandidateAdmission, CandidateRefusedError
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.drift import Drift
from paceline.actors.weights.flat_weights import FlatWeights
from paceline.actors.weights.history import Decision
from paceline.actors.weights.notifications import ChangeNotifier, RegistryChanges, SlotWeights
from paceline.actors.weights.slots import expert_of
from paceline.actors.weights.state_folder import lock_folder
from paceline.actors.weights.topics import (
    AddedTopic,
    AddedTopics,
    RouterHead,
    TopicActors,
    TopicsView,
)
from paceline.actors.weights.version_store import VersionStore
from paceline.actors.weights.versions import RegistryMetrics, TopicStatus, VersionChangedError

logger = logging.getLogger(__name__)

_NOT_FINITE = "weights that are not finite"
# More than a poll and the 30 s that `paceline rollback` waits: it must notice one that hangs.
_SUBSCRIBER_TTL_S = 45.0


class _Subscriber(NamedTuple):
    versions: dict[str, int]  # by slot
    expert: str | None  # whose weights alone it loads
    polled_at: float


class WeightRegistry:
    """Actor (asynchronous, for the long polls) that owns the weights of every topic.

    Changes go to disk before they are announced: what a draft has loaded survives a restart.
    """

    def __init__(
        self,
        directory: str,
        topics: Sequence[str],
        fingerprint: str | Mapping[str, str],
        *,
        keep_versions: int = 3,
        canary: CanarySettings | None = None,
        initial: Mapping[str, str] | None = None,
        put: Callable[[FlatWeights], Reference[FlatWeights]] = ray.put,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Restore the newest versions from disk.

        Args:
            directory: of all versions, on shared storage if there are several hosts. It is
                locked until the process ends.
            topics: all configured experts, ``general`` included; added ones come from disk.
            fingerprint: of the target and the topic's initial draft, by topic; a string for all.
            keep_versions: files kept per topic, beside those in use.
            canary: how candidates are tested; None makes every published version stable at once.
            initial: topic to the folder of its initial draft, for rollbacks to it.
            put: places an object in the object store and returns its reference.
            clock: unix seconds.

        Raises:
            StateFolderLockedError: another process has the directory.
        """
        lock_folder(directory)
        self._added = AddedTopics(directory)
        self._notifier = ChangeNotifier()
        marks = dict.fromkeys(topics, fingerprint) if isinstance(fingerprint, str) else fingerprint
        marks = self._added.inherited({topic: marks[topic] for topic in topics})
        self._canary = canary
        self._clock = clock
        self._subscribers: dict[str, _Subscriber] = {}
        self._monitor = CanaryMonitor(marks, canary)
        self._drifts = {topic: Drift() for topic in marks}
        self._admission = CandidateAdmission(canary)
        self._store = VersionStore(
            directory,
            marks,
            keep_versions=keep_versions,
            canary=canary is not None,
            initial=self._added.inherited(initial or {}),
            put=put,
            clock=clock,
            on_change=self._on_change,
        )
        for topic in self._store:
            self._admission.load(topic, self._store.decisions.of(topic))
            self._restart_trial(topic)

    def publish(
        self, topic: str, flat: FlatWeights, decision: Decision, base: int | None = None
    ) -> int:
        """Publish new weights of a topic, as the candidate if there is a canary.

        A candidate that has no outcomes for a while is replaced.

        Args:
            topic: one of the registry's.
            flat: the weights, as they will be served.
            decision: the gate's figures, kept in the history.
            base: weight_version that these go on from, None if that does not matter.

        Returns:
            the new weight_version.

        Raises:
            KeyError: for an unknown topic.
            CandidateRefusedError: the present candidate must not be replaced, or the topic is in
                cooldown; the same weights may be taken later. Or ``base`` is served no more.
            ValueError: for weights that are not finite.
        """
        state = self._store.state(topic)
        if not flat.finite():
            refused: Decision = {
                "outcome": "refused",
                "version": state.stable,
                "reason": _NOT_FINITE,
                "parent": state.stable,
            }
            self._store.decisions.add(topic, {**decision, **refused})
            raise ValueError(f"{topic}: {_NOT_FINITE}")
        if (refusal := self._refusal(topic)) is not None:
            raise CandidateRefusedError(f"{topic}: {refusal}")
        if base not in (None, state.stable, state.candidate):
            raise CandidateRefusedError(f"{topic}: version {base} is neither stable nor on trial")
        entry: Decision = {**decision, "outcome": "published", "parent": state.stable}
        return self._store.publish(topic, flat, entry, trial=self._canary is not None)

    def _refusal(self, topic: str) -> str | None:
        state, requests = self._store.state(topic), self._monitor.counts(topic)["canary_requests"]
        return self._admission.refusal(topic, state, requests, self._clock())

    def _on_change(self, topic: str) -> None:
        self._restart_trial(topic)
        self._notifier.notify()

    def _restart_trial(self, topic: str) -> None:
        state = self._store.state(topic)
        if state.candidate is None:
            self._monitor.end_trial(topic)
        else:
            self._monitor.begin_trial(topic, state.candidate, state.stable, audit=state.audit)
            self._admission.trial_began(topic, state.candidate, self._clock())

    def report(self, outcomes: Iterable[DraftOutcome]) -> None:
        """Count the drafts of finished requests, and promote or roll back what that decides."""
        for outcome in outcomes:
            topic = outcome.expert
            if topic in self._drifts and self._drifts[topic].add(outcome):
                self._note_drift(topic)
            instruction = self._monitor.observe(outcome)
            if instruction is None:
                continue
            try:
                self._execute(instruction)
            except Exception:  # of the disk or the object store
                logger.exception("%s: the decision could not be carried out", instruction.expert)
                self._restart_trial(instruction.expert)

    def _note_drift(self, topic: str) -> None:
        drift = self._drifts[topic].status()
        logger.info("%s: drifts, %s", topic, drift)
        facts: Decision = {
            "outcome": "drift",
            "acceptance_fast": drift.fast,
            "acceptance_slow": drift.slow,
            "requests": drift.requests,
        }
        self.record_decision(topic, facts)

    def _execute(self, decided: CanaryInstruction) -> None:
        topic, action, stats = decided.expert, decided.action, decided.stats
        state = self._store.state(topic)
        logger.info("%s: %s version %d %s", topic, action, decided.version, stats)
        if action is CanaryAction.TRY_PREVIOUS:
            reason = f"acceptance fell after version {decided.version} was promoted"
            self._try_earlier(topic, state.previous, reason, stats)
            return
        significant = self._monitor.is_significant(topic, action)
        facts: Decision = {**stats, "version": decided.version, "parent": state.stable}
        earlier = state.candidate_from is not None
        if earlier:
            facts["restored_from"] = state.candidate_from
        if action is CanaryAction.PROMOTE:
            after = state.promoted(proven=significant)
            facts["outcome"], facts["proven"] = "promoted", significant
            self._monitor.promote(topic)
        else:
            after = state.rolled_back(shown=significant)
            facts["outcome"] = "kept" if earlier else "rolled_back"
        facts["time"] = self._clock()
        self._store.commit(topic, after, facts)
        self._admission.add(topic, facts)
        if self._canary is not None and after.unproven >= self._canary.audit_after:
            self._audit(topic)

    def _audit(self, topic: str) -> None:
        """Try the last known good version against the unproven ones since."""
        state = self._store.state(topic)
        earlier = state.last_known_good
        reason = f"{state.unproven} versions since {earlier} were not shown to be better"
        if not self._try_earlier(topic, earlier, reason, {"audit": True}):
            reason = f"version {earlier} cannot be read: the stable one is the last known good"
            facts: Decision = {
                "outcome": "restored",
                "version": state.stable,
                "parent": state.stable,
                "reason": reason,
            }
            self._store.commit(topic, state.with_stable_known_good(), facts)

    def _try_earlier(self, topic: str, version: int | None, reason: str, facts: Decision) -> bool:
        """Make an earlier version the candidate; False if it cannot be read."""
        try:
            flat = None if version is None else self._store.weights(topic, version)
        except Exception:  # of an initial draft's folder
            logger.warning("%s: version %s cannot be read", topic, version, exc_info=True)
            flat = None
        if flat is None:
            logger.warning("%s: %s, and version %s is missing", topic, reason, version)
            return False
        stable = self._store.state(topic).stable
        entry: Decision = {
            **facts,
            "outcome": "published",
            "parent": stable,
            "reason": reason,
            "restored_from": version,
        }
        self._store.publish(topic, flat, entry, trial=True)
        return True

    def roll_back(self, topic: str, version: int | None = None, expected: int | None = None) -> int:
        """Withdraw the candidate; without one, or to a given version, restore earlier weights.

        Earlier weights become stable at once, under a new number: a number never falls.

        Args:
            topic: one of the registry's.
            version: whose weights are to be served, 0 for the initial ones; None withdraws the
                candidate, or restores the previous version if there is none.
            expected: the newest served version as known to the caller (TopicVersions.newest);
                it makes a repeated call safe.

        Returns:
            the stable weight_version afterwards.

        Raises:
            KeyError: for an unknown topic.
            VersionChangedError: the newest served version is not the expected one.
            ValueError: there is no earlier version, or its weights are gone.
        """
        state = self._store.state(topic)
        if expected not in (None, state.newest):
            raise VersionChangedError(
                f"{topic}: version {state.newest} is served, and not {expected}"
            )
        entry: Decision = {"outcome": "rolled_back", "parent": state.stable, "reason": MANUAL}
        if version in (None, state.stable) and state.candidate is not None:
            entry = {**entry, **self._monitor.stats(topic), "version": state.candidate}
            self._store.commit(topic, state.rolled_back(), entry)
            return state.stable
        wanted = state.previous if version is None else version
        if wanted is None:
            raise ValueError(f"{topic}: there is no version before {state.stable}")
        flat = self._store.weights(topic, wanted)
        if flat is None:
            raise ValueError(f"{topic}: the weights of version {wanted} are not there")
        entry["restored_from"] = wanted
        restored = self._store.publish(topic, flat, entry, trial=False)
        self._monitor.reset(topic)  # not before: a trial must go on if the disk is full
        return restored

    def add_topic(
        self,
        name: str,
        like: str,
        head: RouterHead | None = None,
        revision: int | None = None,
    ) -> int:
        """Add a topic whose expert starts as a copy of another's stable weights.

        The weights are written first, then the catalogue, then it is announced. After a kill
        before the catalogue is written the name is free; the files are never read.

        Args:
            name: of the topic.
            like: the expert to copy.
            head: of the router, with the topic; None if there is no router.
            revision: of the catalogue whose head that one extends.

        Returns:
            its weight_version; 1, unless there are files of an earlier topic of that name.

        Raises:
            KeyError: for an unknown ``like``.
            ValueError: the name is taken (TopicExistsError) or invalid; another topic came first
                (StaleRevisionError); or the weights to be copied cannot be read.
            OSError: of the disk; nothing was added.
        """
        self._added.check(name, self._store, revision)

        def enter() -> None:
            self._added.add(AddedTopic(name, like, self._clock()), head)
            self._monitor.add_expert(name)
            self._drifts[name] = Drift()

        return self._store.add(name, like, enter)

    def reject(self, topic: str, decision: Decision) -> None:
        """Record that the gate rejected weights; nothing else changes.

        Raises:
            KeyError: for an unknown topic.
        """
        self.record_decision(topic, {**decision, "outcome": "rejected"})

    def record_decision(self, topic: str, decision: Decision) -> None:
        """Record a decision that changes no weights, with its ``outcome``, in the history.

        Raises:
            KeyError: for an unknown topic.
        """
        version = self._store.state(topic).stable
        self._store.decisions.add(topic, {**decision, "version": version, "parent": version})

    def stable_versions(self) -> dict[str, int]:
        """Topic to stable weight_version; 0 are the initial weights."""
        return {topic: state.stable for topic, state in self._store.states().items()}

    def topic_status(self) -> dict[str, TopicStatus]:
        """Status of every topic."""
        oldest = self._clock() - _SUBSCRIBER_TTL_S
        self._subscribers = {n: s for n, s in self._subscribers.items() if s.polled_at >= oldest}
        changed = {
            name: {expert_of(slot) for slot in self._store.changed(own.versions)}
            for name, own in self._subscribers.items()
        }

        def subscribers(topic: str) -> list[str]:
            return [n for n, own in self._subscribers.items() if own.expert in (None, topic)]

        return {
            topic: TopicStatus(
                stable=state.stable,
                candidate=state.candidate,
                restored_from=state.candidate_from,
                **self._monitor.counts(topic),
                closed=self._refusal(topic),
                subscribers=len(subscribers(topic)),
                lagging=tuple(name for name in subscribers(topic) if topic in changed[name]),
                drift=self._drifts[topic].status(),
            )
            for topic, state in self._store.states().items()
        }

    def stable_weights(self, topic: str) -> SlotWeights:
        """A topic's stable weights.

        Without a reference the initial weights stand for the version: at version 0, and if files
        were lost and the initial ones cannot be read.

        Raises:
            KeyError: for an unknown topic.
        """
        return self._store.stable(topic)

    def topics(self) -> TopicsView:
        """The added topics, the router's head, and the handles of the topics' actors."""
        return self._added.view()

    def register_actors(self, topic: str, actors: TopicActors) -> None:
        """Announce the handles of an added topic's actors."""
        if self._added.register_actors(topic, actors):
            self._notifier.notify()

    async def wait_for_changes(
        self,
        versions: Mapping[str, int] | None,
        etag: str | None,
        timeout_s: float,
        subscriber: str | None = None,
        expert: str | None = None,
    ) -> RegistryChanges:
        """Wait for changes of weights or topics; empty after the timeout.

        Args:
            versions: slot to the weight_version that the caller has, a missing slot has 0; None
                if the caller needs no weights.
            etag: of the view that the caller has, "" if none; None if it needs no topics.
            timeout_s: longest wait, seconds.
            subscriber: the caller's name, under which its versions are reported.
            expert: whose weights alone the caller loads; None: those of all experts.
        """
        if subscriber is not None and versions is not None:
            self._subscribers[subscriber] = _Subscriber(dict(versions), expert, self._clock())

        def look() -> RegistryChanges:
            view = self._added.view()
            return RegistryChanges(
                {} if versions is None else self._store.changed(versions),
                None if etag in (None, view.etag) else view,
            )

        return await self._notifier.wait(look, timeout_s)

    def history(self, topic: str | None = None) -> list[Decision]:
        """Decisions on a topic, or on all, oldest first."""
        return self._store.decisions.of(topic)

    def metrics(self) -> RegistryMetrics:
        """Figures for monitoring."""
        decisions = self._store.decisions
        return RegistryMetrics(self.topic_status(), dict(decisions.counts), dict(decisions.gates))

    def ping(self) -> bool:
        """True: the actor answers."""
        return True
