"""The in-process proposer: drafts beside the target, one stack per architecture."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.actors.speculation.costs import DraftPrefill
from paceline.actors.speculation.experts import ExpertStack
from paceline.actors.speculation.proposer import INITIAL_SUFFIX, DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal
from paceline.actors.weights.slots import expert_of

logger = logging.getLogger(__name__)


def merge(parts: Sequence[tuple[list[int], Proposal]], rows: int) -> Proposal:
    """Merge the proposals of several experts, padded to the longest.

    Args:
        parts: (indices into the batch, proposal for these rows), with every row once.
        rows: B.
    """
    if len(parts) == 1 and parts[0][0] == list(range(rows)):
        return parts[0][1]
    steps = max(part.token_ids.shape[1] for _, part in parts)
    support = max(part.support_ids.shape[2] for _, part in parts)
    device = parts[0][1].token_ids.device
    merged = Proposal(
        token_ids=torch.zeros(rows, steps, dtype=torch.int64, device=device),
        num_drafted=torch.zeros(rows, dtype=torch.int64, device=device),
        token_probs=torch.zeros(rows, steps, device=device),
        support_ids=torch.zeros(rows, steps, support, dtype=torch.int64, device=device),
        support_probs=torch.zeros(rows, steps, support, device=device),
    )
    for indices, part in parts:
        at = torch.tensor(indices, device=device)
        length, width = part.support_ids.shape[1:]
        merged.token_ids[at, :length] = part.token_ids
        merged.num_drafted[at] = part.num_drafted
        merged.token_probs[at, :length] = part.token_probs
        merged.support_ids[at, :length, :width] = part.support_ids
        merged.support_probs[at, :length, :width] = part.support_probs
    return merged


class DraftStack(Protocol):
    """Drafts of one kind, which propose in one batch."""

    @property
    def versions(self) -> Mapping[str, int]:
        """Every draft with its weight_version."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """All slots, with those of candidates that are empty."""
        ...

    @property
    def faulty(self) -> frozenset[str]:
        """Drafts with non-finite probabilities in the latest call; their rows are truncated."""
        ...

    @property
    def prefilled(self) -> DraftPrefill:
        """What the latest call of :meth:`propose` prefilled."""
        ...

    def version(self, draft: str) -> int:
        """The weight_version that a draft proposes with."""
        ...

    def model(self, draft: str) -> int:
        """The model that computes a draft."""
        ...

    def num_uncomputed(self, request_id: str, length: int) -> int:
        """Tokens of a sequence to compute before drafting; unknown ones are fine."""
        ...

    def remove_candidate(self, slot: str) -> None:
        """Empty a candidate's slot; unknown ones are fine."""
        ...

    def propose(
        self, rows: Sequence[DraftRow], support: int, generator: torch.Generator
    ) -> Proposal:
        """Draft for rows of these drafts from at most ``support`` tokens per position."""
        ...

    def release(self, request_id: str) -> None:
        """Free what a sequence held; unknown ones are fine."""
        ...

    def load_weights(self, slot: str, weight_version: int, state: Mapping[str, Tensor]) -> None:
        """Load new weights; a ValueError if they do not fit."""
        ...


class ProfiledStack(DraftStack, Protocol):
    """One that says what its steps cost."""

    def step(self, rows: int) -> None:
        """Draft a token for so many rows, as drafting does, and wait for the device."""
        ...


class ColocatedProposer:
    """Drafts in the target's process, with one stack per architecture."""

    timed_out = False

    def __init__(
        self, stacks: Sequence[DraftStack], support: int, generator: torch.Generator
    ) -> None:
        """Take the stacks.

        Args:
            stacks: without a name twice; a draft ``expert@0`` keeps its initial weights for ever.
            support: most tokens of a draft distribution.
            generator: randomness of unseeded drafts.
        """
        self._stacks = {name: stack for stack in stacks for name in (*stack.names, *stack.versions)}
        self._support = support
        self._generator = generator
        self._stack_of: dict[str, DraftStack] = {}
        self.prefilled = DraftPrefill()
        self.faulty: frozenset[str] = frozenset()

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Draft tokens for every row, batched per stack; one that fails costs its rows' drafts."""
        groups: dict[int, tuple[DraftStack, list[int]]] = {}
        for index, row in enumerate(rows):
            stack = self._stack_of[row.request_id] = self._stacks[row.draft]
            groups.setdefault(id(stack), (stack, []))[1].append(index)
        parts, prefilled = [], []
        self.faulty = frozenset()
        for stack, indices in groups.values():
            batch = [rows[i] for i in indices]
            try:
                parts.append((indices, stack.propose(batch, self._support, self._generator)))
                prefilled.append(stack.prefilled)
                self.faulty |= stack.faulty
            except Exception:
                failed = frozenset(row.draft for row in batch)
                logger.exception("no drafts of %s", sorted(failed))
                for row in batch:
                    stack.release(row.request_id)
                parts.append((indices, Proposal.empty(len(batch), self._generator.device)))
                self.faulty |= failed
        self.prefilled = DraftPrefill(
            sum(own.requests for own in prefilled), sum(own.tokens for own in prefilled)
        )
        return merge(parts, len(rows))

    def num_uncomputed(self, request_id: str, draft: str, length: int) -> int:
        """See Proposer."""
        return self._stacks[draft].num_uncomputed(request_id, length)

    def release(self, request_id: str) -> None:
        """See Proposer."""
        stack = self._stack_of.pop(request_id, None)
        if stack is not None:
            stack.release(request_id)

    def add_expert(self, expert: str, like: str) -> Iterator[None]:
        """See Proposer."""
        stack = self._stacks[like]
        if expert in self._stacks:
            return
        if not isinstance(stack, ExpertStack):
            raise ValueError(f"{expert} cannot be a copy of the heads {like}")
        yield from stack.add_expert(expert, like)
        names = [n for n in (*stack.names, *stack.versions) if expert_of(n) == expert]
        # A new dictionary: other threads may be reading the old one.
        self._stacks = {**self._stacks, **dict.fromkeys(names, stack)}

    def load_weights(self, slot: str, weight_version: int, state: Mapping[str, Tensor]) -> None:
        """See Proposer."""
        if slot.endswith(INITIAL_SUFFIX):
            raise ValueError(f"{slot} keeps its initial weights")
        self._stacks[slot].load_weights(slot, weight_version, state)

    def remove_candidate(self, slot: str) -> None:
        """Empty a candidate's slot; unknown ones are fine."""
        if slot in self._stacks:
            self._stacks[slot].remove_candidate(slot)

    def version(self, draft: str) -> int:
        """The weight_version that a draft proposes with."""
        return self._stacks[draft].version(draft)

    def num_models(self, drafts: Collection[str]) -> int:
        """See Proposer."""
        return len(
            {(id(self._stacks[draft]), self._stacks[draft].model(draft)) for draft in drafts}
        )

    def drafts(self) -> dict[str, int]:
        """Every draft with its weight_version, without empty candidates' slots."""
        return {
            name: version
            for name, stack in self._stacks.items()
            if (version := stack.versions.get(name)) is not None
        }
