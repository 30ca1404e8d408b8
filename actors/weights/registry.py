"""The weight registry: owns the published weights, announces versions, outlives restarts.

A *weight_version* is an integer per topic: 0 are the initial weights, which every process has
already, then 1, 2, ... The number never falls, not even when the registry is killed.

Per topic there is a stable version and at most one candidate. With a canary, new weights are
announced as the candidate; the requests that drafted with it decide, against those that drafted
with the stable version meanwhile, whether it becomes stable or goes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray

from paceline.actors.weights.archive import WeightArchive
from paceline.actors.weights.canary import Action, CanarySettings, Step, Trials
from paceline.actors.weights.cooldown import ASKED_FOR, Admission, NotNow
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.flat_weights import FlatWeights
from paceline.actors.weights.notifications import ChangeNotifier, RegistryChanges, SlotWeights
from paceline.actors.weights.state_folder import hold
from paceline.actors.weights.topics import (
    AddedTopic,
    AddedTopics,
    RouterHead,
    TopicParts,
    TopicsView,
)
from paceline.actors.weights.versions import VersionChanged

logger = logging.getLogger(__name__)

_NOT_FINITE = "weights that are not finite"


class WeightRegistry:
    """Actor (asynchronous, for the long polls) that owns the weights of every topic.

    It decides, and WeightArchive carries out: disk first, announcement second, so that what a
    draft has seen survives a restart.
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
        put: Callable[[Any], Any] = ray.put,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Come back with the newest versions on disk.

        Args:
            directory: where versions live; shared storage where there are several hosts. It is
                this process's alone until the process ends.
            topics: all experts, ``general`` included; those that were added come from disk.
            fingerprint: of the target and the topic's initial draft, by topic; one for all
                where it is a string.
            keep_versions: files kept per topic, beside those that are in use.
            canary: how candidates are judged; None has every published version be stable at once.
            initial: topic to the folder of its initial draft, for going back to that.
            put: places an object in the object store and returns its reference.
            clock: unix seconds.

        Raises:
            StateFolderLocked: where another process has the directory.
        """
        hold(directory)
        self._added = AddedTopics(directory)
        self._notifier = ChangeNotifier()
        marks = dict.fromkeys(topics, fingerprint) if isinstance(fingerprint, str) else fingerprint
        marks = self._added.inherited({topic: marks[topic] for topic in topics})
        self._canary = canary
        self._clock = clock
        self._trials = Trials(marks, canary)
        self._admission = Admission(canary)
        self._archive = WeightArchive(
            directory,
            marks,
            keep_versions=keep_versions,
            canary=canary is not None,
            initial=self._added.inherited(initial or {}),
            put=put,
            clock=clock,
            on_change=self._changed,
        )
        for topic in self._archive:
            self._admission.recall(topic, self._archive.decisions.of(topic))
            self._begin_trial(topic)

    def _changed(self, topic: str) -> None:
        self._begin_trial(topic)
        self._notifier.notify()

    def publish(self, topic: str, flat: FlatWeights, decision: dict[str, Any]) -> int:
        """Announce new weights of a topic, on trial where there is a canary.

        A candidate that nobody has judged for a while gives way to the new one.

        Args:
            topic: one of the registry's.
            flat: the weights, as they will be served.
            decision: the gate's figures, kept in the history.

        Returns:
            the new weight_version.

        Raises:
            KeyError: for an unknown topic.
            NotNow: what is on trial must not be replaced, or the topic rests after rollbacks; the
                same weights may be taken another time.
            ValueError: for weights that are not finite.
        """
        state = self._archive.state(topic)
        if not flat.finite():
            facts = {"outcome": "refused", "version": state.stable, "reason": _NOT_FINITE}
            self._archive.decisions.add(topic, decision | facts | {"parent": state.stable})
            raise ValueError(f"{topic}: {_NOT_FINITE}")
        if (refusal := self._refusal(topic)) is not None:
            raise NotNow(f"{topic}: {refusal}")
        entry = decision | {"outcome": "published", "parent": state.stable}
        return self._archive.announce(topic, flat, entry, trial=self._canary is not None)

    def _refusal(self, topic: str) -> str | None:
        state, judged = self._archive.state(topic), self._trials.live(topic)["canary_requests"]
        return self._admission.refusal(topic, state, judged, self._clock())

    def _begin_trial(self, topic: str) -> None:
        state = self._archive.state(topic)
        if state.candidate is None:
            self._trials.end(topic)
        else:
            self._trials.begin(topic, state.candidate, state.stable, audit=state.audit)
            self._admission.began(topic, state.candidate, self._clock())

    def report(self, outcomes: Iterable[DraftOutcome]) -> None:
        """Take what drafts did for finished requests, and decide what that decides."""
        for outcome in outcomes:
            step = self._trials.observe(outcome)
            if step is None:
                continue
            try:
                self._take(step)
            except Exception:  # of the disk or the object store
                logger.exception("%s: the decision could not be carried out", step.expert)
                self._begin_trial(step.expert)

    def _take(self, step: Step) -> None:
        topic, state = step.expert, self._archive.state(step.expert)
        logger.info("%s: %s version %d %s", topic, step.action, step.version, step.figures)
        if step.action is Action.TRY_PREVIOUS:
            reason = f"acceptance fell after version {step.version} was promoted"
            self._try_earlier(topic, state.previous, reason, step.figures)
            return
        shown = self._trials.shown(topic, step.action)
        facts = step.figures | {"version": step.version, "parent": state.stable}
        earlier = state.candidate_from is not None
        if earlier:
            facts["restored_from"] = state.candidate_from
        if step.action is Action.PROMOTE:
            after = state.promoted(proven=shown)
            facts |= {"outcome": "promoted", "proven": shown}
            self._trials.promoted(topic)
        else:
            after = state.rolled_back(shown=shown)
            facts["outcome"] = "kept" if earlier else "rolled_back"
        facts["time"] = self._clock()
        self._archive.commit(topic, after, facts)
        self._admission.take(topic, facts)
        if self._canary is not None and after.unproven >= self._canary.audit_after:
            self._audit(topic)

    def _audit(self, topic: str) -> None:
        """Put the anchor on trial against what came after it and was not shown to be better."""
        state = self._archive.state(topic)
        reason = f"{state.unproven} versions in a row were not shown to be better"
        if not self._try_earlier(topic, state.anchor, reason, {"audit": True}):
            reason = f"version {state.anchor} cannot be read: the stable one is the anchor"
            facts = {"version": state.stable, "parent": state.stable, "reason": reason}
            self._archive.commit(topic, state.anchored(), facts | {"outcome": "restored"})

    def _try_earlier(
        self, topic: str, version: int | None, reason: str, facts: Mapping[str, Any]
    ) -> bool:
        """Put an earlier version on trial against the stable one; False where it is not there."""
        try:
            flat = None if version is None else self._archive.weights(topic, version)
        except Exception:  # of an initial draft's folder
            logger.warning("%s: version %s cannot be read", topic, version, exc_info=True)
            flat = None
        if flat is None:
            logger.warning("%s: %s, and version %s is not there", topic, reason, version)
            return False
        stable = self._archive.state(topic).stable
        entry = {**facts, "outcome": "published", "parent": stable, "reason": reason}
        self._archive.announce(topic, flat, entry | {"restored_from": version}, trial=True)
        return True

    def roll_back(self, topic: str, version: int | None = None, expected: int | None = None) -> int:
        """Withdraw the candidate; without one, or to a given version, go back to earlier weights.

        Earlier weights become stable at once, under a new number: a number never falls.

        Args:
            topic: one of the registry's.
            version: whose weights are to be served, 0 being the initial ones; None: the candidate
                goes, or where there is none the version before the present one comes back.
            expected: the newest version that is served, as the caller knows it (see
                TopicVersions.newest). A call that is repeated with it goes back once.

        Returns:
            the stable weight_version afterwards.

        Raises:
            KeyError: for an unknown topic.
            VersionChanged: another version than the expected one is the newest that is served.
            ValueError: there is no earlier version, or its weights are not there any more.
        """
        state = self._archive.state(topic)
        if expected not in (None, state.newest):
            raise VersionChanged(f"{topic}: version {state.newest} is served, and not {expected}")
        entry: dict[str, Any] = {"outcome": "rolled_back", "reason": ASKED_FOR}
        if version in (None, state.stable) and state.candidate is not None:
            facts = self._trials.figures(topic) | {"version": state.candidate}
            self._archive.commit(
                topic, state.rolled_back(), entry | facts | {"parent": state.stable}
            )
            return state.stable
        wanted = state.previous if version is None else version
        flat = None if wanted is None else self._archive.weights(topic, wanted)
        if wanted is None or flat is None:
            raise ValueError(f"{topic}: the weights of version {wanted} are not there")
        entry |= {"restored_from": wanted, "parent": state.stable}
        self._trials.forget(topic)
        return self._archive.announce(topic, flat, entry, trial=False)

    def add_topic(
        self,
        name: str,
        like: str,
        head: RouterHead | None = None,
        revision: int | None = None,
    ) -> int:
        """Add a topic whose expert starts as a copy of another's stable weights.

        Weights first, then the catalogue, which makes it there; then it is announced. A kill
        before the catalogue leaves files that nobody reads, and the name is free.

        Args:
            name: of the topic.
            like: the expert whose copy it is.
            head: of the router, which knows the topic; None where it does not grow.
            revision: of the catalogue whose head that one was grown from.

        Returns:
            its weight_version; 1, unless there are files of an earlier topic of that name.

        Raises:
            KeyError: for an unknown ``like``.
            ValueError: the name is taken (TopicExists), or no name; another topic came first
                (OutOfDate); or the weights to be copied cannot be read.
            OSError: of the disk. The topic is not there then.
        """
        self._added.check(name, self._archive, revision)

        def enter() -> None:
            self._added.add(AddedTopic(name, like, self._clock()), head)
            self._trials.enlist(name)

        return self._archive.add(name, like, enter)

    def reject(self, topic: str, decision: dict[str, Any]) -> None:
        """Note that the gate turned a candidate down; nothing else changes.

        Raises:
            KeyError: for an unknown topic.
        """
        self.note(topic, decision | {"outcome": "rejected"})

    def note(self, topic: str, decision: dict[str, Any]) -> None:
        """Keep a decision that changes no weights in the history, under its ``outcome``.

        Raises:
            KeyError: for an unknown topic.
        """
        version = self._archive.state(topic).stable
        self._archive.decisions.add(topic, decision | {"version": version, "parent": version})

    def current(self) -> dict[str, int]:
        """Topic to stable weight_version; 0 are the initial weights."""
        return {topic: state.stable for topic, state in self._archive.states().items()}

    def live(self) -> dict[str, dict[str, Any]]:
        """Per topic: ``stable`` and ``candidate`` versions, and counts of its live drafts.

        ``restored_from`` is the earlier version that the candidate is, on trial against one that
        disappoints; None where the candidate is new, or there is none. ``requests``, ``rounds``
        and ``accepted`` (at the first position) count since the registry's start;
        ``canary_requests`` are those that the candidate is judged by so far; ``closed`` says why no
        other candidate is taken now, None where one is.
        """
        return {
            topic: {
                "stable": state.stable,
                "candidate": state.candidate,
                "restored_from": state.candidate_from,
                **self._trials.live(topic),
                "closed": self._refusal(topic),
            }
            for topic, state in self._archive.states().items()
        }

    def stable_weights(self, topic: str) -> SlotWeights:
        """A topic's stable weights.

        Without a reference the initial weights stand for the version: at version 0, and if files
        were lost and the initial ones cannot be read here.

        Raises:
            KeyError: for an unknown topic.
        """
        return self._archive.stable(topic)

    def topics(self) -> TopicsView:
        """The added topics, the router's head, and the handles of the topics' actors."""
        return self._added.view()

    def bring_parts(self, topic: str, parts: TopicParts) -> None:
        """Announce the handles of an added topic's actors."""
        if self._added.bring(topic, parts):
            self._notifier.notify()

    async def wait_for_changes(
        self, versions: Mapping[str, int] | None, etag: str | None, timeout_s: float
    ) -> RegistryChanges:
        """Wait for changes of weights or topics; empty after the timeout.

        Args:
            versions: slot to the weight_version that the caller has, a missing slot has 0; None
                if the caller needs no weights.
            etag: of the view that the caller has, "" if none; None if it needs no topics.
            timeout_s: longest wait, seconds.
        """

        def look() -> RegistryChanges:
            view = self._added.view()
            return RegistryChanges(
                {} if versions is None else self._archive.changed(versions),
                None if etag in (None, view.etag) else view,
            )

        return await self._notifier.wait(look, timeout_s)

    def history(self, topic: str | None = None) -> list[dict[str, Any]]:
        """Decisions of a topic, or of all, oldest first."""
        return self._archive.decisions.of(topic)

    def figures(self) -> dict[str, Any]:
        """:meth:`live`, counts of decisions and last gates; see Decisions."""
        return {
            "live": self.live(),
            "updates": dict(self._archive.decisions.counts),
            "gates": dict(self._archive.decisions.gates),
        }

    def ping(self) -> bool:
        """True: the actor answers."""
        return True
