"""The goodput policy: choose the k that gives the most tokens per second, zero included.

Goodput of a round (TurboSpec, arXiv 2406.14066, here with measured acceptance per position and
several experts that share one target forward):

    sum over rows r of group g of [1 + sum_{i<=k_g} prod_{j<=i} a_{g,j}]  /  T(k_1 ... k_G)

A row may end its drafts before k, where its draft is unsure (EarlyEnd); a_{g,j}
counts that as not accepted, and T is the mean over the lengths that rows of g draft. T includes the
prefill of the drafts, spread over the answers. A group is a draft with greedy or
with sampled requests, with or without a grammar: their acceptance differs.

All rows that draft run the same number of draft steps, so all drafting groups share one k; the
choice is k and the groups that draft. Verification computes the drafted tokens alone if it is
ragged (ModelRunner.is_ragged), else all rows are padded to the longest draft.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from paceline.actors.speculation.costs import DraftCosts, DraftPrefill, PrefillCosts, StepCosts
from paceline.actors.speculation.early_end import CONFIDENCE_BINS, EarlyEnd, confidence_bin

_PRIOR_TRIALS = 4.0
_PRIOR_ACCEPTANCE = 0.6
_WINDOW = 200.0  # trials
_PRIOR_WEIGHT = 0.1  # of trials with other weights, or of the draft's other group
# A new choice must promise this much more than the present one.
_HYSTERESIS = 1.03
# Required goodput over plain decoding, to start and to keep drafting, for one row, and what is
# added for many rows. Estimates err; and the rows of a batch end one by one, so that the last ones
# run in small batches, which a round's goodput does not show.
_WORTH_STARTING, _STARTING_MANY = 1.03, 0.07
_WORTH_KEEPING, _KEEPING_MANY = 1.01, 0.03
_CHOOSE_EVERY = 8  # rounds
_FALLING = 2  # values of k in a row that promise less than a smaller one: larger ones are not tried
_PLAIN_EVERY = 100  # rounds
_PROBE_SHARE = 0.01  # of the rounds' time
_PROBE_ROUNDS = 4
_PROBE_TOKENS = 2
_PROBE_PATIENCE = 64  # rounds
_MAX_PROBE_BUDGET_S = 0.5
_MAX_PROBE_S = 5.0  # of a single probe
_MAX_MIN_REACH = 0.5  # of a padded forward
_MAX_RAGGED_REACH = 0.9
_NO_PREFILL = DraftPrefill()


class DraftGroup(NamedTuple):
    """Rows of one draft, all greedy or all sampled, all with a grammar or all without.

    Acceptance is measured per group.
    """

    draft: str
    sampled: bool = False
    constrained: bool = False

    @classmethod
    def of_draft(cls, draft: str) -> list[DraftGroup]:
        """All groups of a draft."""
        return [cls(draft, sampled, own) for sampled in (False, True) for own in (False, True)]

    @property
    def counterpart(self) -> DraftGroup:
        """The group of the same draft whose acceptance is the best guess for this one's."""
        return DraftGroup(self.draft, self.sampled if self.constrained else not self.sampled)


@dataclass(slots=True)
class AcceptanceEstimate:
    """Decayed conditional acceptance of one group per draft position, and how far it drafts.

    Attributes:
        positions: most tokens of a row.
        hits: accepted tokens by position.
        trials: rows that accepted all before that position, and could draft it.
        drawn: rows that drafted that position.
        offers: rows that could.
        confident: trials and hits by tenths of the draft's own probability of the token.
    """

    positions: int
    hits: list[float] = field(default_factory=list)
    trials: list[float] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    offers: list[float] = field(default_factory=list)
    confident: list[list[float]] = field(default_factory=list)
    _expected: list[float] | None = None
    _lengths: list[float] | None = None

    def __post_init__(self) -> None:
        self.hits, self.trials, self.drawn, self.offers = ([0.0] * self.positions for _ in range(4))
        self.confident = [[0.0, 0.0] for _ in range(CONFIDENCE_BINS)]

    def observe(self, limit: int, drafted: int, accepted: int, probs: Sequence[float] = ()) -> None:
        """Take one row's round.

        Args:
            limit: most tokens that the row could draft.
            drafted: tokens that it drafted.
            accepted: of these.
            probs: of the drafted tokens, by the draft; empty if they say nothing of acceptance.
        """
        self._expected = self._lengths = None
        keep = 1.0 - 1.0 / _WINDOW
        for position in range(min(limit, self.positions)):
            self.offers[position] = keep * self.offers[position] + 1.0
            self.drawn[position] = keep * self.drawn[position] + (position < drafted)
            if position <= accepted:
                self.hits[position] = keep * self.hits[position] + (position < accepted)
                self.trials[position] = keep * self.trials[position] + 1.0
        for position, prob in enumerate(probs[: accepted + 1]):
            own = self.confident[confidence_bin(prob)]
            own[:] = keep * own[0] + 1.0, keep * own[1] + (position < accepted)

    def discount(self) -> None:
        """Keep the counts as a weak prior, as for new weights."""
        self._expected = self._lengths = None
        for counts in (self.hits, self.trials, self.drawn, self.offers, *self.confident):
            counts[:] = [_PRIOR_WEIGHT * count for count in counts]

    def discounted_copy(self) -> AcceptanceEstimate:
        """A weak prior for the counterpart of this group."""
        other = copy.deepcopy(self)
        other.discount()
        return other

    def expected_accepted(self) -> list[float]:
        """Expected accepted tokens of a row for k = 0, 1, ... positions.

        The prior of a position is the estimate of the position before it.
        """
        if self._expected is not None:
            return self._expected
        expected, reach, prior = [0.0], 1.0, _PRIOR_ACCEPTANCE
        for hits, trials in zip(self.hits, self.trials, strict=True):
            prior = (hits + _PRIOR_TRIALS * prior) / (trials + _PRIOR_TRIALS)
            reach *= prior
            expected.append(expected[-1] + reach)
        self._expected = expected
        return expected

    def acceptance_by_confidence(self) -> tuple[float, ...]:
        """Acceptance of a token by tenths of the draft's probability, which is its prior."""
        return tuple(
            (hits + _PRIOR_TRIALS * (i + 0.5) / CONFIDENCE_BINS) / (trials + _PRIOR_TRIALS)
            for i, (trials, hits) in enumerate(self.confident)
        )

    def drafts_at_least(self) -> list[float]:
        """Probability that a row which may draft 0, 1, ... tokens does.

        The prior of a position is the estimate of the position before it.
        """
        if self._lengths is None:
            lengths = [1.0]
            for drawn, offers in zip(self.drawn, self.offers, strict=True):
                prior = _PRIOR_TRIALS * lengths[-1]
                lengths.append(min(lengths[-1], (drawn + prior) / (offers + _PRIOR_TRIALS)))
            self._lengths = lengths
        return self._lengths


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """``k`` tokens for every row of ``groups``; the others decode plainly."""

    k: int = 0
    groups: frozenset[DraftGroup] = frozenset()

    def tokens(self, group: DraftGroup) -> int:
        """Tokens that a row of a group drafts."""
        return self.k if group in self.groups else 0


@dataclass(slots=True)
class _Probe:
    """A few rounds in which a group drafts more than pays, to measure acceptance there.

    Attributes:
        due: whether the group has new weights, or has never been probed.
        rounds_left: drafting rounds until the probe ends.
        patience: rounds until it ends in any case.
        at: the round in which it started.
    """

    due: bool = True
    rounds_left: int = 0
    patience: int = 0
    at: int = -1


class GoodputPolicy:
    """Chooses k round by round. Pure: times and acceptance are given to it.

    Attributes:
        ragged: whether verification computes a row's own tokens alone.
        predicted_goodput: of the present choice, in tokens per second.
    """

    def __init__(
        self,
        target: StepCosts,
        draft: DraftCosts,
        max_tokens: int,
        *,
        ragged: bool = False,
        num_models: Callable[[Collection[str]], int] = len,
    ) -> None:
        """Start without measured acceptance: the prior makes every group worth a try.

        Args:
            target: seconds of a round without its drafting, by (rows, :meth:`column`).
            draft: seconds of drafting, by rows, experts and steps, at the target's pace 1.
            max_tokens: largest k.
            ragged: whether verification computes a row's own tokens alone.
            num_models: of different drafts, see Proposer.
        """
        self.ragged = ragged
        self._num_models = num_models
        self._target = target
        self._draft = draft
        self._positions = self._max_tokens = max_tokens
        self._probe_share = _PROBE_SHARE
        self._acceptance: dict[DraftGroup, AcceptanceEstimate] = {}
        self._probes: dict[DraftGroup, _Probe] = {}
        self._drafted: set[DraftGroup] = set()
        self._probe_budget_s = 0.0  # over all groups
        self._probe_cost_s = 0.0  # of the next probe, the largest of late
        self._choice = DraftChoice()
        self._prefill_s: Mapping[DraftGroup, float] = {}
        self._chosen_for: tuple[tuple[DraftGroup, int], ...] = ()
        self._rounds = 0
        self.predicted_goodput: float | None = None
        self._min_reach = 0.0

    def choose(
        self,
        rows: Mapping[DraftGroup, int],
        others: int = 0,
        prefill_s: Callable[[], Mapping[DraftGroup, float]] = dict,
        prefilling: Mapping[DraftGroup, int] | None = None,
    ) -> Mapping[DraftGroup, int]:
        """Tokens to draft in the next round, per group.

        Args:
            rows: rows of each group for which k is chosen here.
            others: rows of the batch with a k of their own.
            prefill_s: called when a choice is made: per group, the seconds of draft prefill that
                its rows need before they can draft, per token that they will still emit.
            prefilling: those of the rows of which the target still computes the prompt.
        """
        key = tuple(sorted(rows.items()))
        self._rounds += 1
        if self._rounds % _PLAIN_EVERY == 0:
            return dict.fromkeys(rows, 0)  # keeps the cost of plain decoding measured
        if key != self._chosen_for or self._rounds % _CHOOSE_EVERY == 0:
            self._prefill_s = prefill_s()
            self._choice, self.predicted_goodput = self._best(rows, others)
            self._chosen_for = key
            self._min_reach = self._least_reach(rows, others)
        # Without a decoding row a group cannot be probed now, and must not be charged for it.
        here = [group for group, count in rows.items() if count > (prefilling or {}).get(group, 0)]
        below_max = [group for group in here if self._choice.tokens(group) < self._max_tokens]
        oldest = min(below_max, key=lambda group: self._probe(group).at, default=None)
        return {
            group: self._choice.tokens(group)
            + (self._probe_tokens(group, rows, others, oldest) if group in here else 0)
            for group in rows
        }

    def set_limits(self, max_tokens: int | None = None, probe_share: float | None = None) -> None:
        """Choose within other limits from the next round on; None restores those of the start.

        Args:
            max_tokens: largest k, at most that of the start.
            probe_share: share of the rounds' time for probes.
        """
        most = self._positions if max_tokens is None else max_tokens
        self._max_tokens = min(most, self._positions)
        self._probe_share = _PROBE_SHARE if probe_share is None else probe_share
        if self._choice.k > self._max_tokens:
            self._choice = DraftChoice()
        self._chosen_for = ()

    def current_k(self, draft: str) -> int:
        """The k that is chosen for rows of a draft, without probes."""
        return max(self._choice.tokens(group) for group in DraftGroup.of_draft(draft))

    @property
    def max_tokens(self) -> int:
        """The largest k at present."""
        return self._max_tokens

    def column(self, drafted: Sequence[int]) -> int:
        """The size of a verification beside its rows, 1 without drafted tokens.

        Args:
            drafted: tokens per row that drafted.
        """
        return 1 + (sum if self.ragged else max)((0, *drafted))

    def verify_tokens(self, rows: int, drafted: int, forced: Sequence[int]) -> int:
        """Tokens per row to verify, if some rows have tokens that are accepted for certain.

        Args:
            rows: B.
            drafted: most tokens that a row drafted; never less.
            forced: tokens of each row that has forced ones, with those that it drafted.
        """
        most = max([drafted, *forced])
        if self.ragged:  # a token that is accepted for certain pays wherever it costs no padding
            return most

        def goodput(tokens: int) -> float:
            certain = [min(own, tokens) for own in forced]
            seconds = self._target.seconds(rows, tokens + 1)
            return (rows + sum(certain)) / seconds

        return max(range(drafted, most + 1), key=goodput)

    def plain_decode_seconds(self, rows: int, tokens: int) -> float:
        """Expected seconds of plain decoding for ``tokens`` tokens, ``rows`` at a time."""
        return tokens / rows * self._target.seconds(rows, 1)

    def expected_round_seconds(self, most: int) -> list[float]:
        """Expected seconds of a round of one row that drafts 0, 1 ... ``most`` tokens."""
        drafts = [self._draft.seconds(1, 1, k) if k else 0.0 for k in range(most + 1)]
        target, pace = self._target, self._target.pace
        return [target.seconds(1, k + 1) + pace * own for k, own in enumerate(drafts)]

    def plain_is_due(self, rows: int) -> bool:
        """Whether the cost of plain decoding of so many rows has not been measured lately."""
        return not self._target.measured_within(rows, 1, _PLAIN_EVERY)

    def expected_accepted(self, group: DraftGroup, tokens: int) -> float:
        """Expected accepted tokens of a row that drafts so many; of more than k can be, as of k."""
        accepted = self._estimate(group).expected_accepted()
        return accepted[min(tokens, len(accepted) - 1)]

    def round_seconds(
        self, rows: int, tokens: int, drafting: Mapping[DraftGroup, int], k: int
    ) -> float:
        """Expected seconds of a round that verifies tokens which no draft model has to make.

        Args:
            rows: B.
            tokens: so many of each row; if it is ragged, of all rows that do not draft together.
            drafting: rows per group that draft ``k`` tokens.
            k: their limit; what is beyond the most that it can be costs nothing.
        """
        if not drafting:
            return self._target.seconds(rows, tokens + 1)
        return self._drafting_round_s(min(k, self._positions), drafting, rows, tokens)

    def observe_acceptance(
        self,
        group: DraftGroup,
        limit: int,
        drafted: int,
        accepted: int,
        probs: Sequence[float] = (),
    ) -> None:
        """Take the result of one row's drafts, see AcceptanceEstimate.observe."""
        if drafted:
            self._estimate(group).observe(limit, drafted, accepted, probs)
            self._drafted.add(group)

    def observe_round(
        self,
        rows: int,
        column: int,
        verify_s: float | None,
        drafting: tuple[int, int, int],
        draft_s: float,
        prefilled: DraftPrefill = _NO_PREFILL,
    ) -> None:
        """Take the times of a round.

        Args:
            rows: B.
            column: see :meth:`column`.
            verify_s: seconds of all but drafting; None if they tell no cost.
            drafting: (rows, experts, steps) of the drafting; 0 steps if there was none, or its
                time says nothing of the cost of steps.
            draft_s: seconds of drafting.
            prefilled: what drafts prefilled in these seconds.
        """
        if verify_s is None:
            verify_s = self._target.seconds(rows, column)
        else:
            self._target.observe(rows, column, verify_s)
        # Drafts are measured relative to the target's present pace: in a slow moment both must
        # look slow, else the drafts of that moment would be off until their next probe.
        drafted_rows, experts, steps = drafting
        self._draft.observe(drafted_rows, experts, steps, draft_s / self._target.pace, prefilled)
        earned_s = self._probe_share * (verify_s + draft_s)
        # A costly probe comes once enough is saved, but never one that holds up answers for long.
        most = min(max(_MAX_PROBE_BUDGET_S, self._probe_cost_s), _MAX_PROBE_S)
        self._probe_budget_s = min(self._probe_budget_s + earned_s, most)
        for group in self._drafted:
            probe = self._probe(group)
            probe.rounds_left = max(0, probe.rounds_left - 1)
        self._drafted.clear()

    def observe_finished(self, prompt_tokens: int, output_tokens: int) -> None:
        """Take the lengths of a finished request for which k was chosen here."""
        self._draft.prefill_costs.observe_finished(prompt_tokens, output_tokens)

    @property
    def prefill_costs(self) -> PrefillCosts:
        """Costs of draft prefill."""
        return self._draft.prefill_costs

    def reset_acceptance(self, draft: str) -> None:
        """Discount the acceptance of a draft with new weights, and probe it soon."""
        for group in DraftGroup.of_draft(draft):
            if group in self._acceptance:
                self._acceptance[group].discount()
            self._probes[group] = _Probe()
        self._chosen_for = ()

    def early_end(self, group: DraftGroup) -> EarlyEnd:
        """When rows of a group end their drafts, by the present choice."""
        return EarlyEnd(self._min_reach, self._estimate(group).acceptance_by_confidence())

    def _probe(self, group: DraftGroup) -> _Probe:
        return self._probes.setdefault(group, _Probe())

    def _estimate(self, group: DraftGroup) -> AcceptanceEstimate:
        """The acceptance of a group; a new one starts from its counterpart's."""
        known = self._acceptance.get(group)
        if known is None:
            like = self._acceptance.get(group.counterpart)
            known = AcceptanceEstimate(self._positions) if like is None else like.discounted_copy()
            self._acceptance[group] = known
        return known

    def _goodput(self, choice: DraftChoice, rows: Mapping[DraftGroup, int], others: int) -> float:
        """Expected tokens per second of a choice."""
        k, drafting = choice.k, {g: n for g, n in rows.items() if g in choice.groups}
        batch = others + sum(rows.values())
        gains = {g: n * self._estimate(g).expected_accepted()[k] for g, n in drafting.items()}
        gained = sum(gains.values())
        if not (k and drafting):
            return batch / self._target.seconds(batch, 1)
        seconds = self._drafting_round_s(k, drafting, batch)
        # As long as this goes on, later requests have to be prefilled too.
        usual_s = self._draft.prefill_costs.seconds_per_output_token
        for group, n in drafting.items():
            prefill_s = max(self._prefill_s.get(group, 0.0), usual_s) * (n + gains[group])
            seconds += self._target.pace * prefill_s
        return (batch + gained) / seconds

    def _drafting_round_s(
        self, k: int, drafting: Mapping[DraftGroup, int], batch: int, tokens: int = 0
    ) -> float:
        """Expected seconds of a round: drafting is as long as the longest draft of its rows.

        ``tokens`` are those of :meth:`round_seconds`.
        """
        own = sum(drafting.values())
        experts = self._num_models({group.draft for group in drafting})
        lengths = [(self._estimate(group).drafts_at_least(), n) for group, n in drafting.items()]
        shorter = seconds = 0.0
        for longest in range(1, k + 1):
            # That no row drafts more.
            within = (
                1.0 if longest == k else math.prod((1.0 - p[longest + 1]) ** n for p, n in lengths)
            )
            if within > shorter:
                of_length = self._target.pace * self._draft.seconds(own, experts, longest)
                if not self.ragged:
                    of_length += self._target.seconds(batch, max(longest, tokens) + 1)
                seconds += (within - shorter) * of_length
                shorter = within
        if self.ragged:
            drafted = sum(n * sum(p[1 : k + 1]) for p, n in lengths)
            seconds += self._target.seconds_between(batch, 1.0 + drafted + tokens)
        return seconds

    def _verify_s(self, batch: int, own: int, tokens: int) -> float:
        """Expected seconds of a verification if ``own`` rows draft so many tokens each."""
        return self._target.seconds(batch, self.column([tokens] * own))

    def _least_reach(self, rows: Mapping[DraftGroup, int], others: int) -> float:
        """The probability of acceptance at which a row's further token pays for its time."""
        most, batch = max(self._choice.k, 2), others + sum(rows.values())
        own = sum(n for group, n in rows.items() if self._choice.tokens(group)) or max(batch, 1)
        further_s = self._verify_s(batch, own, most) - self._verify_s(batch, own, 1)
        drafts = self._draft.seconds(own, 1, most) - self._draft.seconds(own, 1, 1)
        token_s = (further_s + self._target.pace * drafts) / (most - 1) / own
        assert self.predicted_goodput is not None
        largest = _MAX_RAGGED_REACH if self.ragged else _MAX_MIN_REACH
        return min(max(token_s * self.predicted_goodput, 0.0), largest)

    def _candidates(self, rows: Mapping[DraftGroup, int], k: int) -> Iterable[DraftChoice]:
        """The n groups that gain most with this k, in total and per row, for every n."""
        choices: dict[DraftChoice, None] = {}
        gains = {group: self._estimate(group).expected_accepted()[k] for group in rows}
        for weight in (rows, dict.fromkeys(rows, 1)):
            ranked = sorted(rows, key=lambda group: -gains[group] * weight[group])
            for count in range(len(ranked)):
                choices[DraftChoice(k, frozenset(ranked[: count + 1]))] = None
        return choices

    def _best(self, rows: Mapping[DraftGroup, int], others: int) -> tuple[DraftChoice, float]:
        """The choice and its expected goodput."""

        def goodput(choice: DraftChoice) -> float:
            return self._goodput(choice, rows, others)

        best, promised, falling = DraftChoice(), 0.0, 0
        for k in range(1, self._max_tokens + 1):
            promises = {choice: goodput(choice) for choice in self._candidates(rows, k)}
            found, value = max(promises.items(), key=itemgetter(1))
            falling = 0 if value > promised else falling + 1
            if not falling:
                best, promised = found, value
            elif falling == _FALLING:
                break
        plain = goodput(DraftChoice())
        groups = self._choice.groups & set(rows)
        present = DraftChoice(self._choice.k, groups) if groups else DraftChoice()
        needed = plain * _required_gain(others + sum(rows.values()), drafting=bool(groups))
        if promised < needed:
            return DraftChoice(), plain
        kept = goodput(present)
        better = promised > _HYSTERESIS * kept or kept < needed
        return (best, promised) if better else (present, kept)

    def _probe_tokens(
        self,
        group: DraftGroup,
        rows: Mapping[DraftGroup, int],
        others: int,
        oldest: DraftGroup | None,
    ) -> int:
        """Tokens to draft beyond the choice, so that acceptance stays measured there."""
        probe, k = self._probe(group), self._choice.tokens(group)
        more = min(_PROBE_TOKENS, self._max_tokens - k)
        if not more:
            return 0
        if not (probe.rounds_left and probe.patience):
            if not (probe.due or self._rounds % _CHOOSE_EVERY == 0):
                return 0
            cost_s = self._probe_cost(group, rows, others, k)
            affordable = group == oldest and self._probe_budget_s >= cost_s
            if group == oldest:
                self._probe_cost_s = max(cost_s, 0.99 * self._probe_cost_s)
            if not ((probe.due and k == 0) or affordable):
                return 0
            self._probe_budget_s = max(self._probe_budget_s - cost_s, -_MAX_PROBE_BUDGET_S)
            self._probes[group] = probe = _Probe(
                due=False, rounds_left=_PROBE_ROUNDS, patience=_PROBE_PATIENCE, at=self._rounds
            )
        # Rounds count as probed only if they drafted: a draft that was off prefills first.
        probe.patience -= 1
        return more

    def _probe_cost(
        self, group: DraftGroup, rows: Mapping[DraftGroup, int], others: int, k: int
    ) -> float:
        """Seconds that a probe adds at worst; a draft that was off prefills its prompts first."""
        batch, own = others + sum(rows.values()), rows[group]
        verify = self._verify_s(batch, own, k + _PROBE_TOKENS) - self._verify_s(batch, own, k)
        draft = self._draft.seconds(own, 1, k + _PROBE_TOKENS) - self._draft.seconds(own, 1, k)
        prefill = 0.0 if k else own * self._draft.prefill_costs.seconds_per_request
        drafting = self._target.pace * (_PROBE_ROUNDS * max(draft, 0.0) + prefill)
        return _PROBE_ROUNDS * max(verify, 0.0) + drafting


def _required_gain(rows: int, *, drafting: bool) -> float:
    """Goodput over plain decoding that drafting must promise in a batch of so many rows."""
    many = 1.0 - 1.0 / rows
    if drafting:
        return _WORTH_KEEPING + _KEEPING_MANY * many
    return _WORTH_STARTING + _STARTING_MANY * many
