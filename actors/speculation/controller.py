"""The speculation controller: chooses k, the number of tokens to draft, for every sequence."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence

from paceline.actors.backoff import RoundBackoff
from paceline.actors.engine.sequence import Sequence as RunningSequence
from paceline.actors.speculation.costs import DraftPrefill
from paceline.actors.speculation.early_end import NEVER, EarlyEnd
from paceline.actors.speculation.goodput import DraftGroup, GoodputPolicy
from paceline.actors.speculation.proposer import Proposer
from paceline.actors.speculation.suffix.arm import SuffixDraft
from paceline.actors.speculation.suffix.estimates import choose_lengths, choose_ragged_lengths

logger = logging.getLogger(__name__)

_OBSERVE_EVERY = 4  # rounds, where no draft of a model is there to be chosen
_MAX_WAIT = 8  # rounds


class SpeculationController:
    """Chooses k per sequence: the request's own number, or what the goodput policy chooses.

    If the policy fails, nothing is drafted or an observation is lost; no answer changes.

    Attributes:
        failures: calls of the policy that failed.
    """

    def __init__(self, policy: GoodputPolicy | None, proposer: Proposer) -> None:
        """Put the parts together.

        Args:
            policy: chooses k for requests without a number of their own; None: they do not draft.
            proposer: reports how much of each sequence its drafts have computed.
        """
        self._policy = policy
        self._proposer = proposer
        self._versions: dict[str, int] = {}  # with which each draft last proposed
        self._undrafted = 0  # rounds since one with drafts
        self._choices = RoundBackoff(_MAX_WAIT)
        self.failures = 0

    def choose_num_draft_tokens(
        self,
        batch: Sequence[RunningSequence],
        prefilling: Sequence[RunningSequence],
        disabled: Callable[[str], bool],
    ) -> list[int]:
        """Tokens to draft in the next round, per sequence.

        Where the policy chooses, nothing is drafted for a sequence's first token if the draft
        would have to compute the prompt first: that would delay the first token.

        Args:
            batch: B sequences.
            prefilling: sequences of which the target still computes the prompt; the policy's
                choice, which holds for several rounds, is made for them too.
            disabled: whether a draft must not be used.
        """
        if all(s.num_speculative_tokens == 0 for s in batch):
            return [0] * len(batch)
        uncomputed: set[str] = set()
        chosen: Mapping[DraftGroup, int] = {}
        # In a large batch choosing takes the longest and pays the least often.
        if not self._choices.leaves_out(most=len(batch) - 1):
            uncomputed = {s.request_id for s in batch if self._policy and self._needs_prefill(s)}
            chosen = self._choose_by_group(batch, prefilling, uncomputed)
            if any(chosen.values()):
                self._choices.reset()
            else:
                self._choices.fail()
        wanted = []
        for sequence in batch:
            k = sequence.num_speculative_tokens
            if k is None:
                k = 0 if sequence.request_id in uncomputed else chosen.get(group_of(sequence), 0)
            wanted.append(sequence.draft_budget(0 if disabled(sequence.draft) else k))
        return wanted

    @property
    def max_suffix_tokens(self) -> int:
        """Most suffix tokens of a row; without costs of rounds there are none."""
        return 0 if self._policy is None else self._policy.max_tokens

    def choose_suffix_lengths(
        self,
        batch: Sequence[RunningSequence],
        wanted: Sequence[int],
        drafts: Mapping[int, SuffixDraft],
    ) -> dict[int, int]:
        """Tokens of suffix drafts to verify, by row; the drafts of these rows are not called.

        Args:
            batch: B sequences.
            wanted: tokens that each row's draft is to propose otherwise.
            drafts: by row.
        """
        policy = self._policy
        if policy is None:
            return {}
        groups = [group_of(sequence) for sequence in batch] if any(wanted) else []

        def round_s(tokens: int, drafting: Collection[int]) -> float:
            counts = Counter(groups[i] for i in drafting)
            k = max((wanted[i] for i in drafting), default=0)
            return policy.round_seconds(len(batch), tokens, counts, k)

        try:
            gains = [
                policy.expected_accepted(groups[i], k) if k else 0.0 for i, k in enumerate(wanted)
            ]
            choose = choose_ragged_lengths if policy.ragged else choose_lengths
            return choose({i: d.expected for i, d in drafts.items()}, gains, round_s)
        except Exception:
            self._log_failure("suffix drafts were not weighed")
            return {}

    def plain_is_due(self, batch: Sequence[RunningSequence]) -> bool:
        """Whether this round should measure plain decoding, where suffixes would always draft.

        Not where a grammar may force tokens: such a round is not plain.
        """
        fixed = any(s.num_speculative_tokens for s in batch)
        if self._policy is None or fixed or any(s.grammar is not None for s in batch):
            return False
        return self._policy.plain_is_due(len(batch))

    def early_end(self, sequence: RunningSequence) -> EarlyEnd:
        """When a row ends its drafts; never if the request has a number of its own."""
        if self._policy is None or sequence.num_speculative_tokens is not None:
            return NEVER
        try:
            return self._policy.early_end(group_of(sequence))
        except Exception:
            self._log_failure("no early end of drafts was chosen")
            return NEVER

    def max_forced_tokens(self, sequence: RunningSequence) -> int:
        """The most drafted tokens of a round, with those that a grammar forces."""
        k = sequence.num_speculative_tokens
        if k is None:
            k = 0 if self._policy is None else self._policy.max_tokens
        return sequence.draft_budget(k)

    def verify_tokens(self, rows: int, drafted: int, forced: Sequence[int]) -> int:
        """See GoodputPolicy.verify_tokens; all of them without a policy."""
        if self._policy is not None:
            try:
                return self._policy.verify_tokens(rows, drafted, forced)
            except Exception:
                self._log_failure("forced tokens were not weighed")
        return max([drafted, *forced])

    def observe_round(
        self,
        batch: Sequence[RunningSequence],
        limits: Sequence[int],
        drafted: list[int],
        accepted: list[int],
        by_model: Sequence[int],
        probs: Sequence[Sequence[float]],
        round_s: float | None,
        drafting_s: float,
        *,
        proposed: bool,
    ) -> float | None:
        """Take the results of a round.

        Args:
            batch: B sequences.
            limits: what was chosen for each row.
            drafted: tokens per row.
            accepted: tokens per row.
            by_model: of the drafted tokens, those of draft models, the first; the others, which a
                grammar forced or suffixes proposed, are no draft's merit or cost.
            probs: of the drafted tokens per row, by their drafts.
            round_s: seconds of the whole round; None if they tell no cost.
            drafting_s: seconds of it that went to drafting.
            proposed: whether the proposer was called, and may have prefilled.

        Returns:
            expected seconds of plain decoding for the same tokens; None if unknown.
        """
        if self._policy is None:
            return None
        try:
            prefilled = self._proposer.prefilled if proposed else DraftPrefill()
            for i, sequence in enumerate(batch):
                tried = by_model[i]
                if not tried:
                    continue
                group = group_of(sequence)
                taken = min(accepted[i], tried)
                self._policy.observe_acceptance(group, limits[i], tried, taken, probs[i][:tried])
            active = [s.draft for s, tried in zip(batch, by_model, strict=True) if tried]
            self._undrafted = 0 if any(drafted) else self._undrafted + 1
            fixed = all(s.num_speculative_tokens == 0 for s in batch)
            if fixed and self._undrafted % _OBSERVE_EVERY:  # observing takes its time, too
                return self._policy.plain_decode_seconds(len(batch), len(batch))
            timed_steps = 0 if self._proposer.timed_out else max(by_model)
            sizes = (len(active), self._proposer.num_models(set(active)), timed_steps)
            column = self._policy.column(drafted)
            verify_s = None if round_s is None else round_s - drafting_s
            self._policy.observe_round(len(batch), column, verify_s, sizes, drafting_s, prefilled)
            return self._policy.plain_decode_seconds(len(batch), len(batch) + sum(accepted))
        except Exception:
            self._log_failure("a round was not observed")
            return None

    def observe_finished(self, sequence: RunningSequence) -> None:
        """Take the lengths of a finished request."""
        if sequence.num_speculative_tokens is None:
            lengths = len(sequence.request.prompt_token_ids), sequence.num_output
            self._call(
                lambda policy: policy.observe_finished(*lengths),
                "a finished request was not observed",
            )

    def observe_version(self, draft: str, weight_version: int) -> None:
        """Take the version that a draft proposed with: pool experts load weights themselves."""
        if self._versions.get(draft, weight_version) != weight_version:
            self._reset_acceptance(draft)
        self._versions[draft] = weight_version

    def weights_changed(self, draft: str, weight_version: int | None) -> None:
        """Forget the acceptance of a slot that was loaded, or with None emptied."""
        self._versions.pop(draft, None)
        if weight_version is not None:
            self._versions[draft] = weight_version
        self._reset_acceptance(draft)

    def set_limits(self, max_tokens: int | None, probe_share: float | None) -> None:
        """Change the policy's limits, see GoodputPolicy.set_limits."""
        self._call(lambda policy: policy.set_limits(max_tokens, probe_share), "limits were not set")

    def current_choice(self, drafts: Sequence[str]) -> tuple[dict[str, int], float | None]:
        """The present k of these drafts, and the expected goodput in tokens per second."""
        if self._policy is None:
            return {}, None
        return {d: self._policy.current_k(d) for d in drafts}, self._policy.predicted_goodput

    def expected_round_seconds(self, most: int) -> list[float]:
        """See DraftRunner."""
        if self._policy is None:
            raise ValueError("rounds are profiled only if the policy chooses k")
        return self._policy.expected_round_seconds(most)

    def _reset_acceptance(self, draft: str) -> None:
        self._choices.reset()
        self._call(lambda policy: policy.reset_acceptance(draft), "new weights were not noted")

    def _choose_by_group(
        self,
        batch: Sequence[RunningSequence],
        prefilling: Sequence[RunningSequence],
        uncomputed: Container[str],
    ) -> Mapping[DraftGroup, int]:
        both = (*batch, *prefilling)
        free = Counter(group_of(s) for s in both if s.num_speculative_tokens is None)
        if not free or self._policy is None:
            return {}
        others = len(both) - free.total()
        later = (*prefilling, *(s for s in batch if s.request_id in uncomputed))
        not_decoding = Counter(group_of(s) for s in later if s.num_speculative_tokens is None)
        try:
            return self._policy.choose(free, others, self._prefill_seconds(both), not_decoding)
        except Exception:
            self._log_failure("no number of draft tokens was chosen")
            return {}

    def _needs_prefill(self, sequence: RunningSequence) -> bool:
        """Whether a sequence has no output yet and its draft has not computed the prompt."""
        if sequence.num_output or sequence.num_speculative_tokens is not None:
            return False
        return (
            self._proposer.num_uncomputed(sequence.request_id, sequence.draft, len(sequence.tokens))
            > 0
        )

    def _prefill_seconds(
        self, batch: Sequence[RunningSequence]
    ) -> Callable[[], dict[DraftGroup, float]]:
        """Seconds of outstanding draft prefill per token still to be emitted, by group."""
        assert self._policy is not None
        costs = self._policy.prefill_costs

        def prefill_s() -> dict[DraftGroup, float]:
            seconds: dict[DraftGroup, float] = {}
            remaining: dict[DraftGroup, float] = {}
            for s in batch:
                if s.num_speculative_tokens is None:
                    tokens = self._proposer.num_uncomputed(s.request_id, s.draft, len(s.tokens))
                    own = costs.seconds(1.0, tokens) if tokens else 0.0
                    group = group_of(s)
                    seconds[group] = seconds.get(group, 0.0) + own
                    left = costs.expected_remaining(s.num_output, s.max_tokens)
                    remaining[group] = remaining.get(group, 0.0) + left
            return {group: seconds[group] / left for group, left in remaining.items()}

        return prefill_s

    def _call(self, function: Callable[[GoodputPolicy], None], failure: str) -> None:
        """Call the policy if there is one; log a failure."""
        if self._policy is None:
            return
        try:
            function(self._policy)
        except Exception:
            self._log_failure(failure)

    def _log_failure(self, what: str) -> None:
        """Count a failure; log the 1st, 2nd, 4th, 8th ..., as it may repeat in every round."""
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:
            logger.exception("%s (failure %d)", what, self.failures)


def group_of(sequence: RunningSequence) -> DraftGroup:
    """The acceptance statistics that a sequence belongs to."""
    sampled, constrained = not sequence.request.sampling.greedy, sequence.grammar is not None
    return DraftGroup(sequence.draft, sampled, constrained)
