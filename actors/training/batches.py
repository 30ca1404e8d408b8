"""Replay records to padded tensors. Every emitted position is a loss position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.actors.replay.record import ReplayRecord

_GROUP = 4  # micro-batches that are sorted by length together
# Widths are rounded up to it: oneDNN keeps what it has prepared for each of its last thousand
# shapes, a gigabyte where every batch has a shape of its own.
_WIDTHS = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """B records of at most T tokens, N emitted positions in all.

    Attributes:
        input_ids: int64 ``[B, T]``, padded on the right, where causal attention keeps the
            padding from mattering.
        rows: int64 ``[N]``, the record of each emitted position.
        columns: int64 ``[N]``, the place in ``input_ids`` whose logits predict it.
        output_ids: int64 ``[N]``, the token that was emitted.
        top_ids: int64 ``[N, K]``.
        top_logprobs: float32 ``[N, K]``.
        tail_mass: float32 ``[N]``.
        processed_probs: float32 ``[N, K]``, what the token was really drawn from; for a greedy
            request its T = 1 probabilities.
        temperature: float32 ``[N]``, 0 where greedy.
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

    @property
    def num_records(self) -> int:
        """B."""
        return int(self.input_ids.shape[0])

    @property
    def num_positions(self) -> int:
        """N."""
        return int(self.rows.shape[0])

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""
        return Batch(*(getattr(self, name).to(device) for name in self.__slots__))


def usable(record: ReplayRecord, vocab_size: int) -> bool:
    """Whether a record can teach: it has a prompt and output, of tokens that the model knows."""
    if len(record.output_token_ids) == 0 or len(record.prompt_token_ids) == 0:
        return False
    ids = (record.prompt_token_ids, record.output_token_ids, record.target_top_ids)
    return all(int(part.min()) >= 0 and int(part.max()) < vocab_size for part in ids)


def fit(prompt: int, outputs: int, max_length: int) -> tuple[int, int]:
    """Tokens of prompt and answer that fit: the prompt's last, the answer's first.

    The answer teaches, so it keeps at least half the room; a short prompt leaves it the rest.

    Args:
        prompt: tokens of the prompt, at least 1.
        outputs: tokens of the answer, at least 1.
        max_length: of the input, which lacks the answer's last token; at least 1.
    """
    room = max_length + 1
    kept = min(outputs, max(room - prompt, room // 2))
    return min(prompt, room - kept), kept


def micro_batches(
    records: Sequence[ReplayRecord], size: int, rng: np.random.Generator
) -> list[list[ReplayRecord]]:
    """The records in a random order, in micro-batches of equal size (the last may lack).

    Those of a micro-batch are of similar length, taken from a larger random group: padding
    costs as much as tokens do.

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


def make_batch(records: Sequence[ReplayRecord], max_length: int) -> Batch:
    """Stack records that are :func:`usable`, cut as :func:`fit` says.

    Records with more recorded tokens than others have the surplus moved into their tail.

    Args:
        records: at least one.
        max_length: T at most.
    """
    top = min(record.target_top_ids.shape[1] for record in records)
    sequences, rows, columns, counts = [], [], [], []
    for row, record in enumerate(records):
        kept, outputs = fit(len(record.prompt_token_ids), len(record.output_token_ids), max_length)
        prompt = record.prompt_token_ids[len(record.prompt_token_ids) - kept :]
        # the last output token predicts nothing that was recorded
        sequences.append(np.concatenate([prompt, record.output_token_ids[: outputs - 1]]))
        rows.append(np.full(outputs, row))
        columns.append(np.arange(kept - 1, kept - 1 + outputs))
        counts.append(outputs)
    longest = max(map(len, sequences))
    width = max(longest, min(-(-longest // _WIDTHS) * _WIDTHS, max_length))
    inputs = np.zeros((len(records), width), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        inputs[row, : len(sequence)] = sequence
    cut = list(zip(records, counts, strict=True))
    return Batch(
        input_ids=torch.from_numpy(inputs),
        rows=_tensor(rows, np.int64),
        columns=_tensor(columns, np.int64),
        output_ids=_tensor([r.output_token_ids[:n] for r, n in cut], np.int64),
        top_ids=_tensor([r.target_top_ids[:n, :top] for r, n in cut], np.int64),
        top_logprobs=_tensor([r.target_top_logprobs[:n, :top] for r, n in cut], np.float32),
        tail_mass=_tensor([_tail(r, top)[:n] for r, n in cut], np.float32),
        processed_probs=_tensor([_processed(r)[:n, :top] for r, n in cut], np.float32),
        temperature=_tensor([np.full(n, r.temperature) for r, n in cut], np.float32),
    )


def _tail(record: ReplayRecord, top: int) -> np.ndarray:
    surplus = np.exp(record.target_top_logprobs[:, top:].astype(np.float32)).sum(-1)
    tail: np.ndarray = record.target_tail_mass + surplus
    return tail


def _processed(record: ReplayRecord) -> np.ndarray:
    if record.processed_top_probs is not None:
        return record.processed_top_probs
    probs: np.ndarray = np.exp(record.target_top_logprobs.astype(np.float32))
    return probs


def _tensor(parts: Sequence[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype))


def _length(record: ReplayRecord) -> int:
    return len(record.prompt_token_ids) + len(record.output_token_ids)
