"""The draft runner: proposes draft tokens for a batch and observes the results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from paceline.actors.backoff import RoundBackoff
from paceline.actors.engine.grammar import GrammarState
from paceline.actors.engine.sequence import Sequence as RunningSequence
from paceline.actors.engine.stats import RoundStats
from paceline.actors.speculation.controller import SpeculationController
from paceline.actors.speculation.goodput import GoodputPolicy
from paceline.actors.speculation.pending_updates import PendingUpdates
from paceline.actors.speculation.proposer import DraftRow, Proposer
from paceline.actors.speculation.rejection_sampler import Proposal
from paceline.actors.speculation.suffix.arm import SuffixArm
from paceline.actors.speculation.suffix.store import SuffixStore
from paceline.actors.weights.slots import is_candidate

logger = logging.getLogger(__name__)

_MAX_BACKOFF = 256  # rounds


class DraftRunner:
    """Calls the proposer with the controller's k and reports every round's results to both.

    A proposer that fails costs the round its drafts, never an answer.

    Attributes:
        updates: weight updates, to be put at any time and applied between two rounds.
        round_stats: counts and times of all rounds.
    """

    def __init__(
        self,
        proposer: Proposer,
        policy: GoodputPolicy | None,
        device: torch.device,
        clock: Callable[[], float],
        suffixes: SuffixArm | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            proposer: where draft tokens come from.
            policy: chooses k for requests without a number of their own; None: they do not draft.
            device: the target's.
            clock: seconds, monotonic.
            suffixes: drafts without a model; None for none.
        """
        self._proposer = proposer
        self._suffixes = suffixes
        self._look_ups = RoundBackoff(_MAX_BACKOFF)  # of suffixes
        self._controller = SpeculationController(policy, proposer)
        self.updates = PendingUpdates(proposer, self._controller, clock)
        self.round_stats = RoundStats()
        self._device = device
        self._clock = clock
        self._round_start = 0.0
        self._timed = True
        self._drafting_s = 0.0
        self._proposed = False
        self._limits: list[int] = []
        self._probs = torch.empty(0)
        self._failures = 0
        self._backoffs: dict[str, RoundBackoff] = {}  # of drafts that failed in a row

    @property
    def failures(self) -> int:
        """Rounds in which drafting or choosing k failed."""
        return self._failures + self._controller.failures

    @property
    def suffix_store(self) -> SuffixStore | None:
        """Recorded answers that suffix drafts are taken from, or None."""
        return None if self._suffixes is None else self._suffixes.store

    def drafts(self) -> dict[str, int]:
        """Every draft that a request may name, with its weight_version."""
        return self._proposer.drafts()

    def release(self, request_id: str) -> None:
        """Forget a sequence."""
        self._proposer.release(request_id)
        if self._suffixes is not None:
            self._suffixes.release(request_id)

    def propose(
        self,
        batch: Sequence[RunningSequence],
        target_rows: Sequence[int],
        prefilling: Sequence[RunningSequence] = (),
        *,
        timed: bool = True,
    ) -> Proposal:
        """Draft tokens for the batch; starts the round's clock.

        Args:
            batch: B sequences.
            target_rows: row of each in the target's KV cache.
            prefilling: sequences of which the target still computes the prompt; k is chosen for
                them too, as they decode soon.
            timed: False if the round computes prompts too: its time tells no cost of decoding.
        """
        self._round_start, self._timed = self._clock(), timed
        self.updates.failed_candidates.assign_reports(batch)
        chosen = self._controller.choose_num_draft_tokens(
            batch, prefilling, self._disabled_drafts()
        )
        # A draft may read what the target has computed: of a prompt that this round ends, nothing.
        num_draft_tokens = [k if s.prefilled else 0 for s, k in zip(batch, chosen, strict=True)]
        self._limits = num_draft_tokens
        grammars = {i: s.grammar for i, s in enumerate(batch) if s.grammar is not None}
        most = {i: self._controller.max_forced_tokens(batch[i]) for i in grammars}
        # What the grammar knows needs no draft.
        forced = {i: grammar.forced((), most[i]) for i, grammar in grammars.items()}
        known = [i for i, tokens in forced.items() if tokens]
        num_draft_tokens, suffixes = self._look_up_suffixes(batch, num_draft_tokens, known)
        without = {*known, *suffixes}
        waiting = {draft for draft, backoff in self._backoffs.items() if backoff.leaves_out()}
        indices = [
            i
            for i, k in enumerate(num_draft_tokens)
            if k > 0 and i not in without and batch[i].draft not in waiting
        ]
        proposal = Proposal.empty(len(batch), self._device)
        self._proposed = bool(indices)
        if self._proposed:
            rows = [self._row(batch[i], target_rows[i], num_draft_tokens[i]) for i in indices]
            proposal = self._call_proposer(rows, proposal, indices, batch)
            for i in indices:
                version = self._proposer.version(batch[i].draft)
                batch[i].set_draft_version(version)
                self._controller.observe_version(batch[i].draft, version)
        try:
            proposal = proposal.with_suffixes(suffixes)
            if grammars:
                most = {i: max(own, len(suffixes.get(i, ()))) for i, own in most.items()}
                proposal = self._constrain(proposal, grammars, most)
        except Exception:
            self._failures += 1
            logger.exception("the round continues without speculation")
            proposal = Proposal.empty(len(batch), self._device)
        self._probs = proposal.token_probs
        self._drafting_s = self._clock() - self._round_start
        return proposal

    def _look_up_suffixes(
        self, batch: Sequence[RunningSequence], wanted: list[int], known: Collection[int]
    ) -> tuple[list[int], dict[int, list[int]]]:
        """Choose suffix drafts in place of others.

        Args:
            batch: B sequences.
            wanted: tokens that each row's draft is to propose.
            known: rows that need no drafts.

        Returns:
            what is wanted of drafts beside them, and the suffix drafts by row.
        """
        if self._suffixes is None:
            return wanted, {}
        # In a large batch looking up takes the longest and pays the least often.
        if self._look_ups.leaves_out(most=len(batch) - 1):
            return wanted, {}
        try:
            found = self._suffixes.look_up(batch, self._controller.max_suffix_tokens)
            for i in known:
                found.pop(i, None)
            self._look_ups.fail()
            if not found:
                return wanted, {}
            if self._timed and self._controller.plain_is_due(batch):
                return [0] * len(batch), {}
            lengths = self._controller.choose_suffix_lengths(batch, wanted, found)
            if lengths:
                self._look_ups.reset()
            return wanted, {i: found[i].tokens[:n] for i, n in lengths.items()}
        except Exception:
            self._give_up_suffixes()
            return wanted, {}

    def _give_up_suffixes(self) -> None:
        self._failures += 1
        logger.exception("there are no suffix drafts any more")
        self._suffixes = None

    def _constrain(
        self,
        proposal: Proposal,
        grammars: Mapping[int, GrammarState],
        most: Mapping[int, int],
    ) -> Proposal:
        """Cut drafts where verification must end, and append the tokens that grammars force.

        Args:
            proposal: of B rows.
            grammars: by row.
            most: tokens of these rows, forced ones included.
        """
        counts, tokens = proposal.num_drafted.tolist(), proposal.token_ids.tolist()
        kept, forced = {}, {}
        for i, grammar in grammars.items():
            kept[i] = grammar.num_verifiable(tokens[i][: counts[i]])
            own = tokens[i][: kept[i]]
            forced[i] = grammar.forced(own, most[i] - len(own))
        drafted = max([kept.get(i, count) for i, count in enumerate(counts)])
        lengths = [kept[i] + len(own) for i, own in forced.items() if own]
        length = self._controller.verify_tokens(len(counts), drafted, lengths)
        return proposal.with_forced(kept, {i: own[: length - kept[i]] for i, own in forced.items()})

    def finish_round(
        self,
        batch: Sequence[RunningSequence],
        drafted: list[int],
        accepted: list[int],
        by_model: Sequence[int],
    ) -> None:
        """Take the results of a round, per row; ``by_model`` as in SpeculationController.

        The controller observes all tokens that were verified; ``round_stats`` counts emitted ones.
        """
        self.updates.failed_candidates.confirm_reports()
        round_s, tokens = self._clock() - self._round_start, len(batch) + sum(accepted)
        plain_s = self._controller.observe_round(
            batch,
            self._limits,
            drafted,
            accepted,
            by_model,
            self._probs.tolist(),
            round_s if self._timed else None,
            self._drafting_s,
            proposed=self._proposed,
        )
        if any(s.request.background for s in batch):  # then all are, and their speed does not count
            return
        if self._timed:
            self.round_stats.add_round(round_s, self._drafting_s, tokens, plain_s)
        for s in batch:
            if s.num_speculative_tokens != 0:
                self.round_stats.add_row(s.request.topic, s.draft, s.weight_version, *s.last_round)
            if s.last_suffix[0]:
                self.round_stats.add_suffix(s.request.topic, *s.last_suffix)

    def finish_request(self, sequence: RunningSequence) -> None:
        """Take the lengths of a finished request, and its answer for suffix drafts."""
        self._controller.observe_finished(sequence)
        if self._suffixes is not None:
            try:
                self._suffixes.record(sequence)
            except Exception:
                self._give_up_suffixes()

    def current_choice(self) -> tuple[dict[str, int], float | None]:
        """The controller's present k by draft, and the expected goodput in tokens per second."""
        drafts = sorted({draft for _, draft in list(self.round_stats.counts)})
        return self._controller.current_choice(drafts)

    def expected_round_seconds(self, most: int) -> list[float]:
        """Profiled seconds of a round of one request that drafts 0, 1 ... ``most`` tokens.

        Raises:
            ValueError: no policy has profiled them.
        """
        return self._controller.expected_round_seconds(most)

    def _disabled_drafts(self) -> Callable[[str], bool]:
        """Whether a draft's weights are loaded only in part."""
        partial_loads = self.updates.partial_loads
        if not partial_loads:
            return lambda _: False
        loaded = self._proposer.drafts()
        return lambda draft: partial_loads.affects(draft, loaded)

    def _row(self, sequence: RunningSequence, target_row: int, k: int) -> DraftRow:
        return DraftRow(
            request_id=sequence.request_id,
            draft=sequence.draft,
            tokens=sequence.tokens,
            num_output=sequence.num_output,
            num_draft_tokens=k,
            sampling=sequence.request.sampling,
            target_row=target_row,
            early_end=self._controller.early_end(sequence),
            grammar=sequence.grammar,
        )

    def _call_proposer(
        self,
        rows: list[DraftRow],
        nothing: Proposal,
        indices: list[int],
        batch: Sequence[RunningSequence],
    ) -> Proposal:
        try:
            proposal = self._proposer.propose(rows).scatter(indices, len(batch))
            faulty = self._proposer.faulty
        except Exception:
            logger.exception("the round continues without speculation")
            for row in rows:
                self._proposer.release(row.request_id)
            proposal, faulty = nothing, frozenset(row.draft for row in rows)
        for draft in {row.draft for row in rows} - faulty:
            self._backoffs.pop(draft, None)
        if faulty:
            self._failures += 1
            # The next round goes on without the candidates: stable drafts do not wait for them.
            if not self._remove_candidates(faulty, batch):
                logger.warning("no drafts of %s", sorted(faulty))
                for draft in faulty:
                    self._backoffs.setdefault(draft, RoundBackoff(_MAX_BACKOFF)).fail()
        return proposal

    def _remove_candidates(self, drafts: frozenset[str], batch: Sequence[RunningSequence]) -> bool:
        """Remove the candidates among drafts that failed; returns whether there were some."""
        loaded = self._proposer.drafts()  # an empty slot drafts as the stable one
        failed = {d: loaded[d] for d in drafts if is_candidate(d) and d in loaded}
        for draft in failed:
            self.updates.remove_candidate(draft)
        for sequence in batch:
            if sequence.draft in failed:
                sequence.failed_version = failed[sequence.draft]
        return bool(failed)
