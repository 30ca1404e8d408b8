"""How many tokens to draft: the number that gives the most tokens per second, zero included.

Goodput of a round (TurboSpec, arXiv 2406.14066, here with measured acceptance per position and
several experts that share one target forward):

    sum over rows r with use u of [1 + sum_{i<=k_u} prod_{j<=i} a_{u,j}]  /  T(k_1 ... k_U)

T counts what drafts have to read, spread over the answers. A use is an expert with greedy or with
sampled requests: what is accepted differs between the two (see acceptance.py).

All rows that draft go through the same number of draft steps and are verified by one padded
forward, so uses that take part draft the same k; the choice is k and who takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.actors.speculation.costs import DraftCosts, ReadingCosts, Reads, StepCosts

_PRIOR_TRIALS = 4.0
_PRIOR_ACCEPTANCE = 0.6
_WINDOW = 200.0
# What counts of other weights' trials, or of the other use's: little, but more than nothing.
_HEARSAY = 0.1


class Use(NamedTuple):
    """An expert, and whether the requests that it drafts for are sampled or greedy."""

    draft: str
    sampled: bool = False

    @classmethod
    def of(cls, draft: str) -> tuple[Use, Use]:
        """Both uses of an expert."""
        return cls(draft, sampled=False), cls(draft, sampled=True)

    @property
    def other(self) -> Use:
        """The same expert with the other kind of request."""
        return Use(self.draft, not self.sampled)


@dataclass(slots=True)
class Acceptance:
    """Decayed conditional acceptance of one use, per position of a draft."""

    positions: int
    hits: list[float] = field(default_factory=list)
    trials: list[float] = field(default_factory=list)
    _lengths: list[float] | None = None

    def __post_init__(self) -> None:
        self.hits, self.trials = [0.0] * self.positions, [0.0] * self.positions

    def observe(self, drafted: int, accepted: int) -> None:
        """One row's round: positions up to the first rejection were tried."""
        self._lengths = None
        keep = 1.0 - 1.0 / _WINDOW
        for position in range(min(drafted, accepted + 1, self.positions)):
            self.hits[position] = keep * self.hits[position] + (position < accepted)
            self.trials[position] = keep * self.trials[position] + 1.0

    def forget(self) -> None:
        """New weights: what was seen says little about them."""
        self._lengths = None
        self.hits = [_HEARSAY * h for h in self.hits]
        self.trials = [_HEARSAY * t for t in self.trials]

    def taken_after(self) -> Acceptance:
        """A start for the same expert's other use: this one's figures, with little weight."""
        other = Acceptance(self.positions)
        other.hits, other.trials = list(self.hits), list(self.trials)
        other.forget()
        return other

    def expected_lengths(self) -> list[float]:
        """Expected accepted tokens of a row for k = 0, 1, ... positions.

        A position that was seldom tried takes after the one before it.
        """
        if self._lengths is not None:
            return self._lengths
        lengths, reach, prior = [0.0], 1.0, _PRIOR_ACCEPTANCE
        for hits, trials in zip(self.hits, self.trials, strict=True):
            prior = (hits + _PRIOR_TRIALS * prior) / (trials + _PRIOR_TRIALS)
            reach *= prior
            lengths.append(lengths[-1] + reach)
        self._lengths = lengths
        return lengths


_HYSTERESIS = 1.03
# What drafting must promise over plain decoding to be taken up, and to be kept, at one row and what
# is added for very many. Estimates err; and rows of a batch that draft end one after the other, so
# that the last of them run in small batches, which a round's goodput does not show.
_WORTH_STARTING, _STARTING_MANY = 1.03, 0.07
_WORTH_KEEPING, _KEEPING_MANY = 1.01, 0.03
_PLAN_EVERY = 8
_PROBE_SHARE = 0.01
_PROBE_ROUNDS = 4
_PROBE_TOKENS = 2
_PATIENCE = 64
_MOST_CREDIT_S = 0.5
_PLAIN_EVERY = 100
_NO_READS = Reads()


@dataclass(frozen=True, slots=True)
class Plan:
    """``k`` tokens for every row of ``uses``; the others decode plainly."""

    k: int = 0
    uses: frozenset[Use] = frozenset()

    def tokens(self, use: Use) -> int:
        """How many tokens a row of this use drafts."""
        return self.k if use in self.uses else 0


@dataclass(slots=True)
class _Probe:
    """A look at a use beyond what it drafts now; ``at`` is the round of the last one."""

    due: bool = True
    rounds_left: int = 0
    patience: int = 0
    at: int = -1


class GoodputController:
    """Chooses k round by round. Pure: it is told what happened and how long it took."""

    def __init__(self, target: StepCosts, draft: DraftCosts, max_tokens: int) -> None:
        """Start without knowledge of acceptance: the prior makes every use worth a try.

        Args:
            target: seconds of a round without its drafting, by (rows, tokens per row).
            draft: seconds of drafting, by rows, experts and steps, at the target's pace 1.
            max_tokens: largest k.
        """
        self._target = target
        self._draft = draft
        self._positions = self._max_tokens = max_tokens
        self._probe_share = _PROBE_SHARE
        self._acceptance: dict[Use, Acceptance] = {}
        self._probes: dict[Use, _Probe] = {}
        self._drafted: set[Use] = set()
        self._credit = 0.0  # seconds that looks may cost, over all uses
        self._plan = Plan()
        self._unread: Mapping[Use, float] = {}
        self._planned_for: tuple[tuple[Use, int], ...] = ()
        self._rounds = 0
        self.predicted: float | None = None  # goodput of the present plan, tokens per second

    def plan(
        self,
        rows: Mapping[Use, int],
        others: int = 0,
        unread: Callable[[], Mapping[Use, float]] = dict,
        coming: Mapping[Use, int] | None = None,
    ) -> Mapping[Use, int]:
        """Tokens to draft in the next round, per use.

        Args:
            rows: how many rows of each use leave the choice to the controller.
            others: rows of the batch that do not.
            unread: asked where a choice is made: per use, the seconds of what it has to read
                before it can draft for its rows, for each token that they will emit yet.
            coming: those of the rows whose prompts are still being read.
        """
        key = tuple(sorted(rows.items()))
        self._rounds += 1
        if self._rounds % _PLAIN_EVERY == 0:
            return dict.fromkeys(rows, 0)  # what plain decoding costs must stay known
        if key != self._planned_for or self._rounds % _PLAN_EVERY == 0:
            self._unread = unread()
            self._plan = self._best(rows, others)
            self._planned_for = key
            self.predicted = self._goodput(self._plan, rows, others)
        # who has no row that decodes cannot be looked at now, and shall not pay for it
        here = [use for use, count in rows.items() if count > (coming or {}).get(use, 0)]
        # nor is there anything beyond for who drafts the most already
        more = [use for use in here if self._plan.tokens(use) < self._max_tokens]
        oldest = min(more, key=lambda use: self._probe(use).at, default=None)
        return {
            use: self._plan.tokens(use)
            + (self._probe_tokens(use, rows, others, oldest) if use in here else 0)
            for use in rows
        }

    def limit(self, max_tokens: int | None = None, probe_share: float | None = None) -> None:
        """Choose within other limits from the next round on, None those of the start.

        Args:
            max_tokens: largest k, at most that of the start.
            probe_share: of the rounds' time, for looks beyond what pays.
        """
        most = self._positions if max_tokens is None else max_tokens
        self._max_tokens = min(most, self._positions)
        self._probe_share = _PROBE_SHARE if probe_share is None else probe_share
        if self._plan.k > self._max_tokens:
            self._plan = Plan()
        self._planned_for = ()

    def chosen(self, draft: str) -> int:
        """The k that the present plan has for rows of an expert, looks beyond it left out."""
        return max(self._plan.tokens(use) for use in Use.of(draft))

    def plain_seconds(self, rows: int, tokens: int) -> float:
        """What plain decoding is expected to take for ``tokens`` tokens, ``rows`` at a time."""
        return tokens / rows * self._target.seconds(rows, 1)

    def accepted(self, use: Use, drafted: int, accepted: int) -> None:
        """What verification made of one row's drafts."""
        if drafted:
            self._of(use).observe(drafted, accepted)
            self._drafted.add(use)

    def took(
        self,
        rows: int,
        tokens: int,
        verify_s: float,
        drafting: tuple[int, int, int],
        draft_s: float,
        reads: Reads = _NO_READS,
    ) -> None:
        """How long a round took.

        Args:
            rows: B.
            tokens: tokens per row in the target's forward, k + 1.
            verify_s: seconds of all but drafting.
            drafting: (rows, experts, steps) of the drafting; 0 steps where there was none, or
                its time says nothing of what steps cost.
            draft_s: its seconds.
            reads: what drafts read in them.
        """
        self._target.observe(rows, tokens, verify_s)
        # Drafts are known at the target's pace of that time: in a slow moment both must look slow,
        # else whoever is at work then would lose, and stay out until looked at again.
        drafted_rows, experts, steps = drafting
        self._draft.observe(drafted_rows, experts, steps, draft_s / self._target.pace, reads)
        self._credit = min(self._credit + self._probe_share * (verify_s + draft_s), _MOST_CREDIT_S)
        for use in self._drafted:
            probe = self._probe(use)
            probe.rounds_left = max(0, probe.rounds_left - 1)
        self._drafted.clear()

    def ended(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request that leaves the choice to the controller has ended: its lengths."""
        self._draft.reading.ended(prompt_tokens, output_tokens)

    @property
    def reading(self) -> ReadingCosts:
        """What it costs drafts to read prompts."""
        return self._draft.reading

    def swapped(self, draft: str) -> None:
        """New weights: look at them soon."""
        for use in Use.of(draft):
            if use in self._acceptance:
                self._acceptance[use].forget()
            self._probes[use] = _Probe()
        self._planned_for = ()

    def _probe(self, use: Use) -> _Probe:
        return self._probes.setdefault(use, _Probe())

    def _of(self, use: Use) -> Acceptance:
        """What is known of a use; where it is new, it takes after the expert's other one."""
        known = self._acceptance.get(use)
        if known is None:
            like = self._acceptance.get(use.other)
            known = Acceptance(self._positions) if like is None else like.taken_after()
            self._acceptance[use] = known
        return known

    def _goodput(self, plan: Plan, rows: Mapping[Use, int], others: int) -> float:
        drafting = {use: n for use, n in rows.items() if use in plan.uses}
        batch = others + sum(rows.values())
        gains = {use: n * self._of(use).expected_lengths()[plan.k] for use, n in drafting.items()}
        gained = sum(gains.values())
        seconds = self._target.seconds(batch, plan.k + 1)
        if plan.k and drafting:
            own = sum(drafting.values())
            draft_s = self._draft.seconds(own, len({use.draft for use in drafting}), plan.k)
            # Those that come after have to be read too, as long as this goes on.
            usual = self._draft.reading.usual_s
            for use, n in drafting.items():
                draft_s += max(self._unread.get(use, 0.0), usual) * (n + gains[use])
            seconds += self._target.pace * draft_s
        return (batch + gained) / seconds

    def _candidates(self, rows: Mapping[Use, int]) -> Iterable[Plan]:
        """Those that gain most, and those that gain most a row: the best, with ever more beside."""
        plans = {Plan(): None}
        for k in range(1, self._max_tokens + 1):
            lengths = {use: self._of(use).expected_lengths()[k] for use in rows}
            for weight in (rows, dict.fromkeys(rows, 1)):
                ranked = sorted(rows, key=lambda use: -lengths[use] * weight[use])
                for count in range(len(ranked)):
                    plans[Plan(k, frozenset(ranked[: count + 1]))] = None
        return plans

    def _best(self, rows: Mapping[Use, int], others: int) -> Plan:
        best = max(self._candidates(rows), key=lambda plan: self._goodput(plan, rows, others))
        present = Plan(self._plan.k, self._plan.uses & set(rows))
        if not present.uses:
            present = Plan()
        promised = self._goodput(best, rows, others)
        gain = promised / self._goodput(Plan(), rows, others)
        if gain < _worth(others + sum(rows.values()), drafting=bool(present.k)):
            return Plan()
        return best if promised > _HYSTERESIS * self._goodput(present, rows, others) else present

    def _probe_tokens(
        self, use: Use, rows: Mapping[Use, int], others: int, oldest: Use | None
    ) -> int:
        """Draft further now and then than it pays, so that acceptance stays known there."""
        probe, k = self._probe(use), self._plan.tokens(use)
        more = min(_PROBE_TOKENS, self._max_tokens - k)
        if not more:
            return 0
        if not (probe.rounds_left and probe.patience):
            if not (probe.due or self._rounds % _PLAN_EVERY == 0):
                return 0
            cost = self._probe_cost(use, rows, others, k)
            wanted = (probe.due and k == 0) or (use == oldest and self._credit >= cost)
            if not wanted:
                return 0
            self._credit = max(self._credit - cost, -_MOST_CREDIT_S)
            self._probes[use] = probe = _Probe(
                due=False, rounds_left=_PROBE_ROUNDS, patience=_PATIENCE, at=self._rounds
            )
        # Only rounds that drafted count: a draft that was off reads its prompt first.
        probe.patience -= 1
        return more

    def _probe_cost(self, use: Use, rows: Mapping[Use, int], others: int, k: int) -> float:
        """Seconds that a probe adds at worst; a draft that was off reads its prompts first."""
        batch, own = others + sum(rows.values()), rows[use]
        further = k + _PROBE_TOKENS + 1
        verify = self._target.seconds(batch, further) - self._target.seconds(batch, k + 1)
        draft = self._draft.seconds(own, 1, k + _PROBE_TOKENS) - self._draft.seconds(own, 1, k)
        reading = 0.0 if k else own * self._draft.reading.request_s
        drafting = self._target.pace * (_PROBE_ROUNDS * max(draft, 0.0) + reading)
        return _PROBE_ROUNDS * max(verify, 0.0) + drafting


def _worth(rows: int, *, drafting: bool) -> float:
    """What drafting must promise over plain decoding in a batch of so many rows."""
    many = 1.0 - 1.0 / rows
    if drafting:
        return _WORTH_KEEPING + _KEEPING_MANY * many
    return _WORTH_STARTING + _STARTING_MANY * many
