"""The interface of proposers, the sources of draft tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.actors.engine.grammar import GrammarState
from paceline.actors.engine.request import SamplingParams
from paceline.actors.speculation.costs import DraftPrefill
from paceline.actors.speculation.early_end import NEVER, EarlyEnd
from paceline.actors.speculation.rejection_sampler import Proposal

INITIAL_SUFFIX = "@0"


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One sequence to draft for.

    Attributes:
        request_id: key of the sequence in the proposer's state.
        draft: the expert, or an expert's initial weights (``sql@0``).
        tokens: all tokens so far, prompt and output; the proposer never changes them.
        num_output: how many of them are output.
        num_draft_tokens: most tokens to propose, at least 1.
        sampling: the request's sampling parameters.
        target_row: row of the sequence in the target's KV cache.
        early_end: when a row of most probable tokens ends them; a proposer may ignore it.
        grammar: of a constrained answer. A proposer may ignore it: verification does not.
    """

    request_id: str
    draft: str
    tokens: Sequence[int]
    num_output: int
    num_draft_tokens: int
    sampling: SamplingParams
    target_row: int = 0
    early_end: EarlyEnd = NEVER
    grammar: GrammarState | None = None


class Proposer(Protocol):
    """Proposes tokens for a batch. It may be slow, wrong or fail, and never changes an answer."""

    @property
    def timed_out(self) -> bool:
        """Whether the latest round waited in vain for drafts: its time is no cost of drafting."""
        ...

    @property
    def prefilled(self) -> DraftPrefill:
        """What the latest call of :meth:`propose` prefilled before drafting."""
        ...

    @property
    def faulty(self) -> frozenset[str]:
        """Drafts that failed in the latest round; their rows are truncated or empty."""
        ...

    def num_uncomputed(self, request_id: str, draft: str, length: int) -> int:
        """Tokens of a sequence of ``length`` that a draft must compute before it can propose."""
        ...

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Draft tokens for every row, in the rows' order, padded to the longest."""
        ...

    def release(self, request_id: str) -> None:
        """Forget a sequence; unknown ones are fine."""
        ...

    def load_weights(self, slot: str, weight_version: int, state: Mapping[str, Tensor]) -> None:
        """Load new weights into an expert's slot, stable or candidate.

        Raises:
            KeyError: there is no such slot.
            ValueError: the weights do not fit, or are not to be loaded from here.
        """
        ...

    def remove_candidate(self, slot: str) -> None:
        """Empty a candidate's slot; its sequences continue with the stable weights."""
        ...

    def add_expert(self, expert: str, like: str) -> Iterator[None]:
        """Add an expert, a part at a time; one that is known is left as it is.

        Args:
            expert: name of the new expert.
            like: the expert of which the initial weights are copied.

        Raises:
            KeyError: there is no ``like``.
            ValueError: ``like`` has no weights to copy.
        """
        ...

    def version(self, draft: str) -> int:
        """The weight_version that a draft would propose with now."""
        ...

    def num_models(self, drafts: Collection[str]) -> int:
        """How many models compute these different drafts: fewer if some have the same weights."""
        ...

    def drafts(self) -> dict[str, int]:
        """Every draft that a request may name, with its weight_version."""
        ...
