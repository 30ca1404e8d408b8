"""The in-process proposer: one draft model per expert, beside the target, batched per expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.actors.decoding.kv import RowTable
from paceline.actors.decoding.noise import gumbel, stream_key
from paceline.actors.decoding.proposer import INITIAL_SUFFIX, DraftRow
from paceline.actors.decoding.runner import ModelRunner
from paceline.actors.decoding.sampling import (
    SamplingBatch,
    batch_params,
    exponential_race,
    keep_mask,
)
from paceline.actors.decoding.verification import Proposal


def draft_support(logits: Tensor, batch: SamplingBatch, size: int) -> tuple[Tensor, Tensor]:
    """The truncated distribution that a draft proposes from.

    Args:
        logits: float ``[B, V]``.
        batch: sampling parameters of the B rows.
        size: S, the most tokens that may be proposed.

    Returns:
        ids int64 ``[B, S]`` in descending order of probability and float32 ``[B, S]`` that
        sum to 1. A greedy row puts everything on its most probable token.
    """
    top, ids = logits.float().topk(min(size, logits.shape[-1]), dim=-1)
    probs = torch.softmax(top / batch.temperature[:, None], dim=-1)
    if batch.any_filter:
        probs = probs * (keep_mask(probs, batch.top_p, batch.top_k) | batch.greedy[:, None])
        probs = probs / probs.sum(-1, keepdim=True)
    return ids, probs


def pick_tokens(
    ids: Tensor,
    probs: Tensor,
    batch: SamplingBatch,
    output_positions: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Column of the token that each row proposes, int64 ``[B]``.

    Greedy rows take the first; seeded rows add the very noise that verification adds;
    unseeded rows draw.
    """
    columns = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
    if batch.any_unseeded:
        rows = (~batch.seeded & ~batch.greedy).nonzero()[:, 0]
        columns[rows] = exponential_race(probs[rows], generator)
    if batch.any_seeded:
        rows = (batch.seeded & ~batch.greedy).nonzero()[:, 0]
        noise = gumbel(stream_key(batch.seeds[rows], output_positions[rows]), ids[rows])
        columns[rows] = (probs[rows].double().log() + noise).argmax(dim=-1)
    return columns


class Expert:
    """One draft model, its rows, and how far each row has been computed."""

    def __init__(self, runner: ModelRunner, rows: int, weight_version: int = 0) -> None:
        self.runner = runner
        self.weight_version = weight_version
        self.table = RowTable(rows)
        # Per sequence: positions whose keys and values are right, and the drafts after them.
        self._computed: dict[str, int] = {}
        self._drafted: dict[str, list[int]] = {}

    def swap(self, weight_version: int, state: Mapping[str, Tensor]) -> None:
        """Take new weights; the rows' keys and values are of the old ones and get recomputed."""
        self.runner.load_weights(state)
        self.weight_version = weight_version
        self.reset()

    def reset(self) -> None:
        """Recompute every row before it is used again."""
        self._computed = dict.fromkeys(self._computed, 0)
        self._drafted.clear()

    def release(self, request_id: str) -> None:
        """Free a sequence's row."""
        if request_id not in self.table:
            return
        moved = self.table.release(request_id)
        self._computed.pop(request_id, None)
        self._drafted.pop(request_id, None)
        if moved is not None:
            other, source, destination = moved
            # The drafts behind the computed part may be valid too: move them along.
            length = self._computed[str(other)] + len(self._drafted.get(str(other), ()))
            self.runner.kv.move(source, destination, length)

    def order(self, request_id: str) -> int:
        """Sorting key under which a batch of all rows is a contiguous view; new ones go last."""
        return self.table.row(request_id) if request_id in self.table else self.table.limit

    def _known(self, row: DraftRow) -> int:
        """How many positions of a sequence are right: computed ones and drafts that came true."""
        known = self._computed[row.request_id]
        for token in self._drafted.pop(row.request_id, [])[:-1]:  # the last was never fed back
            if known >= len(row.tokens) or row.tokens[known] != token:
                break
            known += 1
        return known

    def catch_up(self, row: DraftRow) -> int:
        """Bring a sequence to within two tokens of its end.

        Returns:
            its row. Every round then starts with the last two tokens, because after full
            acceptance the last draft token has not been through the draft yet.
        """
        if row.request_id not in self.table:
            self.table.add(row.request_id)
            self._computed[row.request_id] = 0
        slot = self.table.row(row.request_id)
        known, wanted = self._known(row), max(len(row.tokens) - 2, 0)
        if known < wanted:
            self.runner.prefill(slot, row.tokens[known:wanted], known)
        self._computed[row.request_id] = len(row.tokens)
        return slot

    @torch.inference_mode()
    def propose(
        self, rows: Sequence[DraftRow], support: int, generator: torch.Generator
    ) -> Proposal:
        """Draft for rows of this expert, one forward per position."""
        slots = [self.catch_up(row) for row in rows]
        device = self.runner.device
        batch = batch_params([row.sampling for row in rows], device)
        lengths = [len(row.tokens) for row in rows]
        # A prompt of one token feeds it twice at position 0: the same write, done twice.
        tokens = torch.tensor([(2 * list(row.tokens[-2:]))[-2:] for row in rows], device=device)
        positions = torch.tensor([[max(n - 2, 0), n - 1] for n in lengths], device=device)
        outputs = torch.tensor([row.num_output for row in rows], device=device)
        index = torch.arange(len(rows), device=device)
        drafted: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for step in range(max(row.num_draft_tokens for row in rows)):
            logits = self.runner.forward(slots, tokens, positions, max(lengths) + step, keep=1)
            ids, probs = draft_support(logits[:, -1], batch, support)
            column = pick_tokens(ids, probs, batch, outputs + step, generator)
            chosen = ids[index, column]
            drafted.append((chosen, probs[index, column], ids, probs))
            tokens, positions = chosen[:, None], positions[:, -1:] + 1
        chosen, chosen_probs, ids, probs = (
            torch.stack(column, dim=1) for column in zip(*drafted, strict=True)
        )
        for row, guesses in zip(rows, chosen.tolist(), strict=True):
            self._drafted[row.request_id] = guesses
        counts = torch.tensor([row.num_draft_tokens for row in rows], device=device)
        return Proposal(chosen, counts, chosen_probs, ids, probs)


def merge(parts: Sequence[tuple[list[int], Proposal]], rows: int) -> Proposal:
    """Put the proposals of several experts into one, padded to the longest.

    Args:
        parts: (indices into the batch, proposal for these rows), covering every row once.
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


class ColocatedProposer:
    """All experts in the target's process, each with its own rows."""

    def __init__(
        self, experts: Mapping[str, Expert], support: int, generator: torch.Generator
    ) -> None:
        """Take the experts.

        Args:
            experts: by name; a name that ends in ``@0`` keeps its initial weights for ever.
            support: the most tokens that a draft's distribution may hold.
            generator: randomness of unseeded drafts.
        """
        self._experts = dict(experts)
        self._support = support
        self._generator = generator
        self._draft_of: dict[str, str] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Draft tokens for every row, batched per expert."""
        groups: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(row.draft, []).append(index)
            self._draft_of[row.request_id] = row.draft
        parts = []
        for draft, indices in groups.items():
            expert = self._experts[draft]
            indices.sort(key=lambda i, expert=expert: expert.order(rows[i].request_id))  # type: ignore[misc]
            batch = [rows[i] for i in indices]
            parts.append((indices, expert.propose(batch, self._support, self._generator)))
        return merge(parts, len(rows))

    def release(self, request_id: str) -> None:
        """Free what a sequence held."""
        draft = self._draft_of.pop(request_id, None)
        if draft is not None:
            self._experts[draft].release(request_id)

    def swap(self, expert: str, weight_version: int, state: Mapping[str, Tensor]) -> None:
        """Put new weights in place of an expert's present ones.

        Raises:
            KeyError: for an expert that is not here.
            ValueError: for weights of another shape.
        """
        if expert.endswith(INITIAL_SUFFIX):
            raise ValueError(f"{expert} keeps its initial weights")
        self._experts[expert].swap(weight_version, state)

    def version(self, draft: str) -> int:
        """The weight_version that a draft proposes with."""
        return self._experts[draft].weight_version

    def drafts(self) -> dict[str, int]:
        """Every draft with its weight_version."""
        return {name: expert.weight_version for name, expert in self._experts.items()}
