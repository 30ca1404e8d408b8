"""Batches of replay records as padded tensors, with labels at every emitted position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.actors.replay.record import ReplayRecord, fit
from paceline.actors.training.branches import Packed, layout, pack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GROUP = 4  # micro-batches that are sorted by length together
# Widths are rounded up to it: oneDNN caches primitives of its last thousand shapes, a gigabyte if
# every batch has a shape of its own.
_WIDTHS = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """B records of at most T tokens, with N labelled positions, emitted ones and branches.

    Attributes:
        input_ids: int64 ``[B, T]``, padded on the right; attention is causal.
        rows: int64 ``[N]``, the record of each position.
        columns: int64 ``[N]``, the place in ``input_ids`` with the logits of its prediction.
        output_ids: int64 ``[N]``, the emitted token; in a branch the target's most probable one.
        top_ids: int64 ``[N, K]``.
        top_logprobs: float32 ``[N, K]``.
        tail_mass: float32 ``[N]``.
        processed_probs: float32 ``[N, K]``, of the distribution that was sampled; for a greedy
            request the T = 1 probabilities, for a constrained one those at its temperature, with
            the tail at T = 1.
        temperature: float32 ``[N]``, 0 is greedy.
        accepted: int64 ``[N]``, 1 accepted, 0 rejected, -1 not drafted; in a branch -1.
        branch: bool ``[N]``, whether the position is behind a rejected token, see branches.py.
        position_ids: int64 ``[B, T]``, and
        mask: bool ``[B, T, T]``, what each token sees; both None without branches: causal.
        hidden: bfloat16 ``[B, T, H]``, the target's hidden states, zeros where not recorded; None
            if no record has them.
    """

    input_ids: Tensor
    rows: Tensor
    columns: Tensor
    output_ids: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    tail_mass: Tensor
    processed_probs: Tensor
    temperature: Tensor
    accepted: Tensor
    branch: Tensor
    position_ids: Tensor | None = None
    mask: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def num_records(self) -> int:
        """B."""
        return int(self.input_ids.shape[0])

    @property
    def num_positions(self) -> int:
        """N."""
        return int(self.rows.shape[0])

    def positions(self, at: slice) -> Batch:
        """Part of the positions, of the same records."""
        return replace(self, **{name: getattr(self, name)[at] for name in _LABELS})

    def to(self, device: torch.device | str) -> Batch:
        """A copy on another device."""
        parts: list[Any] = [getattr(self, name) for name in self.__slots__]
        moved: list[Any] = [None if part is None else part.to(device) for part in parts]
        return Batch(*moved)


def usable(record: ReplayRecord, vocab_size: int) -> bool:
    """Whether a draft can learn a record: it has a prompt and output, within the vocabulary.

    Other recorded tokens may be beyond the vocabulary, see :func:`within`.
    """
    if len(record.output_token_ids) == 0 or len(record.prompt_token_ids) == 0:
        return False
    known = [record.prompt_token_ids, record.output_token_ids]
    top = [record.target_top_ids]
    if record.branch_top_ids is not None and record.branch_top_ids.size:
        assert record.branch_token_ids is not None
        known += [record.branch_token_ids, record.branch_top_ids[:, 0]]  # labels, as outputs are
        top.append(record.branch_top_ids)
    if any(int(part.min()) < 0 or int(part.max()) >= vocab_size for part in known):
        return False
    return all(part.shape[1] <= vocab_size and int(part.min(initial=0)) >= 0 for part in top)


def within(record: ReplayRecord, vocab_size: int) -> ReplayRecord:
    """A usable record with recorded tokens within a draft's vocabulary.

    The target's vocabulary may be padded to more. The probability of a recorded token beyond the
    draft's moves into the tail; one of its last tokens takes the place, with probability 0.

    Returns:
        the record itself if there is no such token.
    """
    found = _inside(record.target_top_ids, record.target_top_logprobs, vocab_size)
    if found is not None:
        ids, logprobs, lost, beyond = found
        processed = record.processed_top_probs
        record = replace(
            record,
            target_top_ids=ids,
            target_top_logprobs=logprobs,
            target_tail_mass=record.target_tail_mass + lost,
            processed_top_probs=None if processed is None else np.where(beyond, 0, processed),
        )
    if record.branch_top_ids is None:
        return record
    assert record.branch_top_logprobs is not None
    assert record.branch_tail_mass is not None
    found = _inside(record.branch_top_ids, record.branch_top_logprobs, vocab_size)
    if found is None:
        return record
    ids, logprobs, lost, _ = found
    return replace(
        record,
        branch_top_ids=ids,
        branch_top_logprobs=logprobs,
        branch_tail_mass=record.branch_tail_mass + lost,
    )


def _inside(
    top_ids: NDArray[np.int32], logprobs: NDArray[np.float16], vocab_size: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[np.bool_]] | None:
    """Replace ids beyond a vocabulary.

    Returns:
        ids and log-probabilities ``[N, K]``, the probability ``[N]`` that was beyond, and a mask of
        it, bool ``[N, K]``; None if no id is beyond.
    """
    beyond = top_ids >= vocab_size
    if not beyond.any():
        return None
    ids, count = top_ids.copy(), top_ids.shape[1]
    last = np.arange(max(vocab_size - 2 * count, 0), vocab_size)
    for row in np.flatnonzero(beyond.any(axis=1)):
        free = np.setdiff1d(last, ids[row])[::-1]
        ids[row, beyond[row]] = free[: int(beyond[row].sum())]
    lost = np.exp(logprobs.astype(np.float32)).sum(axis=1, where=beyond)
    return ids, np.where(beyond, logprobs.dtype.type(-np.inf), logprobs), lost, beyond


def token_counts(records: Sequence[ReplayRecord]) -> Counter[int]:
    """How often the target emitted a token or found it most probable."""
    counts: Counter[int] = Counter()
    for record in records:
        counts.update(record.output_token_ids.tolist())
        counts.update(record.target_top_ids[:, 0].tolist())
    return counts


def vocabulary_coverage(
    vocabulary: NDArray[np.int32], size: int, records: Sequence[ReplayRecord]
) -> float:
    """Share of the target's recorded probability on some tokens, the mean over all positions.

    Of the probability in the recorded tails no token is known: it is left out.

    Args:
        vocabulary: the tokens, int32 ``[D]``.
        size: V, of the target's vocabulary.
        records: at least one.
    """
    known = np.zeros(size, dtype=bool)
    known[vocabulary] = True
    shares = []
    for record in records:
        probs = np.exp(record.target_top_logprobs.astype(np.float32))
        covered = probs.sum(axis=1, where=known[record.target_top_ids])
        shares.append(covered / probs.sum(axis=1))
    return float(np.concatenate(shares).mean())


def plain_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that every draft vocabulary has: single characters, bytes and special tokens."""
    single = {i for text, i in tokenizer.get_vocab().items() if len(text) == 1 or _is_byte(text)}
    return single | set(tokenizer.added_tokens_decoder)


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def micro_batches(
    records: Sequence[ReplayRecord], size: int, rng: np.random.Generator
) -> list[list[ReplayRecord]]:
    """The records in random order, in micro-batches of equal size but the last.

    Records of a micro-batch have similar lengths, out of a larger random group: padding costs as
    much as tokens do.

    Args:
        records: any number.
        size: of a micro-batch, records.
        rng: of the order.
    """
    order = rng.permutation(len(records))
    batches = []
    for at in range(0, len(order), _GROUP * size):
        group = sorted((records[i] for i in order[at : at + _GROUP * size]), key=_length)
        batches += [group[n : n + size] for n in range(0, len(group), size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def make_batch(
    records: Sequence[ReplayRecord], max_length: int, *, branches: bool = False
) -> Batch:
    """Stack usable records, truncated by :func:`paceline.actors.replay.record.fit`.

    The recorded tokens of a record that others do not have as many of move into its tail.

    Args:
        records: at least one.
        max_length: tokens of a record's text at most.
        branches: whether to add the positions behind rejected tokens.
    """
    top = min(record.target_top_ids.shape[1] for record in records)
    texts, starts, packed, parts = [], [], [], []
    for row, record in enumerate(records):
        kept, outputs = fit(len(record.prompt_token_ids), len(record.output_token_ids), max_length)
        starts.append(len(record.prompt_token_ids) - kept)
        prompt = record.prompt_token_ids[starts[-1] :]
        # the last output token has no label behind it
        texts.append(np.concatenate([prompt, record.output_token_ids[: outputs - 1]]))
        parts.append(_emitted(record, row, np.arange(kept - 1, kept - 1 + outputs), top))
        if branches:
            packed.append(pack(record, kept, outputs, max_length))
            parts.append(_behind(record, row, len(texts[-1]), packed[-1], top))
    batch = _padded(texts, packed if any(map(len, packed)) else [], parts, max_length)
    if any(record.hidden is None for record in records):
        return batch
    width = batch.input_ids.shape[1]
    return replace(batch, hidden=_hidden(records, starts, [*map(len, texts)], width))


def _hidden(
    records: Sequence[ReplayRecord], starts: Sequence[int], lengths: Sequence[int], width: int
) -> Tensor:
    """The recorded hidden states of texts, bfloat16 ``[B, T, H]``, zeros where there are none.

    Args:
        records: B, all with hidden states.
        starts: position of each text's first token.
        lengths: tokens of each text.
        width: T.
    """
    parts = [record.hidden for record in records if record.hidden is not None]
    states = np.zeros((len(records), width, parts[0].shape[1]), dtype=np.uint16)
    for row, (record, own, start, length) in enumerate(
        zip(records, parts, starts, lengths, strict=True)
    ):
        first = max(start, record.hidden_start)
        end = min(start + length, record.hidden_start + len(own))
        known = own[first - record.hidden_start : max(end, first) - record.hidden_start]
        states[row, first - start : first - start + len(known)] = known
    return torch.from_numpy(states).view(torch.bfloat16)


def _padded(
    texts: Sequence[NDArray[Any]],
    packed: Sequence[Packed],
    parts: Sequence[dict[str, NDArray[Any]]],
    max_length: int,
) -> Batch:
    """Pad rows of texts and their branches."""
    rows = list(texts)
    if packed:
        own = [branches.token_ids for branches in packed]
        rows = [np.concatenate(pair) for pair in zip(texts, own, strict=True)]
    longest = max(map(len, rows))
    width = -(-longest // _WIDTHS) * _WIDTHS
    if not packed:
        width = max(longest, min(width, max_length))
    inputs = np.zeros((len(rows), width), dtype=np.int64)
    for row, tokens in enumerate(rows):
        inputs[row, : len(tokens)] = tokens
    batch = Batch(torch.from_numpy(inputs), **{name: _stacked(parts, name) for name in _LABELS})
    if not packed:
        return batch
    positions, mask = layout([len(text) for text in texts], packed, width)
    return replace(batch, position_ids=torch.from_numpy(positions), mask=torch.from_numpy(mask))


# Labels of a position, with their dtypes.
_LABELS: dict[str, type] = {
    "rows": np.int64,
    "columns": np.int64,
    "output_ids": np.int64,
    "top_ids": np.int64,
    "top_logprobs": np.float32,
    "tail_mass": np.float32,
    "processed_probs": np.float32,
    "temperature": np.float32,
    "accepted": np.int64,
    "branch": np.bool_,
}


def _emitted(
    record: ReplayRecord, row: int, columns: NDArray[np.int64], top: int
) -> dict[str, NDArray[Any]]:
    """The labels of a record's emitted positions, its first ones."""
    n = len(columns)
    logprobs = record.target_top_logprobs[:n]
    return {
        "rows": np.full(n, row),
        "columns": columns,
        "output_ids": record.output_token_ids[:n],
        "top_ids": record.target_top_ids[:n, :top],
        "top_logprobs": logprobs[:, :top],
        "tail_mass": _tail(logprobs, record.target_tail_mass[:n], top),
        "processed_probs": _processed(record)[:n, :top],
        "temperature": np.full(n, record.temperature),
        "accepted": record.accepted[:n],
        "branch": np.zeros(n, dtype=bool),
    }


def _behind(
    record: ReplayRecord, row: int, text: int, packed: Packed, top: int
) -> dict[str, NDArray[Any]]:
    """The labels of the positions in a record's branches, which follow ``text`` tokens."""
    n, rows = len(packed), packed.sources
    ids, logprobs, tail = (
        record.target_top_ids[:0],
        record.target_top_logprobs[:0],
        record.target_tail_mass[:0],
    )
    if record.branch_top_ids is not None:
        assert record.branch_top_logprobs is not None
        assert record.branch_tail_mass is not None
        ids, logprobs = record.branch_top_ids[rows], record.branch_top_logprobs[rows]
        tail = record.branch_tail_mass[rows]
    return {
        "rows": np.full(n, row),
        "columns": np.arange(text, text + n),
        "output_ids": ids[:, 0],
        "top_ids": ids[:, :top],
        "top_logprobs": logprobs[:, :top],
        "tail_mass": _tail(logprobs, tail, top),
        "processed_probs": np.exp(logprobs[:, :top].astype(np.float32)),
        "temperature": np.full(n, record.temperature),
        "accepted": np.full(n, -1),
        "branch": np.ones(n, dtype=bool),
    }


def _tail(
    logprobs: NDArray[np.float16], tail_mass: NDArray[np.float32], top: int
) -> NDArray[np.float32]:
    surplus = np.exp(logprobs[:, top:].astype(np.float32)).sum(-1)
    tail: NDArray[np.float32] = tail_mass + surplus
    return tail


def _processed(record: ReplayRecord) -> NDArray[Any]:
    if record.processed_top_probs is not None:
        return record.processed_top_probs
    logprobs = record.target_top_logprobs.astype(np.float32)
    probs: NDArray[Any] = np.exp(logprobs)
    if record.temperature in (0.0, 1.0):
        return probs
    # Relative to the first token, of which a low temperature leaves nothing to underflow.
    odds = np.exp((logprobs - logprobs[:, :1]) / record.temperature)
    scaled: NDArray[Any] = odds / (odds.sum(-1) + record.target_tail_mass / probs[:, 0])[:, None]
    return scaled


def _stacked(parts: Sequence[dict[str, NDArray[Any]]], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([part[name] for part in parts]).astype(_LABELS[name]))


def _length(record: ReplayRecord) -> int:
    return len(record.prompt_token_ids) + len(record.output_token_ids)
