"""The replay record of one finished request, and its wire format.

For every emitted position (accepted, recovered, bonus or decoded without a draft) it holds the
target's top-K distribution, so that a draft trains without running the target again, even a draft
that is switched off. Optionally it also holds the target's distributions after each rejected draft
token: contexts that the draft itself produced.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

MAX_LENGTH = 512  # tokens of a record that drafts learn from, see `fit`
_SYNTHETIC = "synthetic:"


def belongs(record: str, answer: str | None) -> bool:
    """Whether a record is an answer's, or a synthetic one made from its prompt.

    An answer's record has its name, or that and the number of a choice.

    Args:
        record: its request_id.
        answer: id of the answer in the API; None stands for all answers.
    """
    if answer is None:
        return True
    source = source_id(record)
    name, dash, number = source.rpartition("-")
    return answer in (record, source) or (bool(dash) and name == answer and number.isdecimal())


def synthetic_id(source: str, mark: str) -> str:
    """Request_id of a synthetic record.

    Args:
        source: request_id of the record whose prompt it answers again.
        mark: distinguishes several of one source; without a colon.
    """
    return f"{_SYNTHETIC}{mark}:{source}"


def is_synthetic(record: str) -> bool:
    """Whether a record is synthetic: a further answer to a stored prompt."""
    return record.startswith(_SYNTHETIC)


def source_id(record: str) -> str:
    """The source of a synthetic record; any other record's own name."""
    return record.split(":", 2)[2] if is_synthetic(record) and record.count(":") > 1 else record


SCHEMA_VERSION = 3
_READABLE = (1, 2, 3)  # 1 has no branches, 2 no hidden states

_SCALARS: dict[str, type] = {
    "request_id": str,
    "topic": str,
    "expert": str,
    "weight_version": int,
    "created": float,
    "temperature": float,
    "top_p": float,
    "top_k": int,
}
# Dtype (little-endian on the wire) and axes.
_ARRAYS: dict[str, tuple[str, str]] = {
    "prompt_token_ids": ("<i4", "P"),
    "output_token_ids": ("<i4", "N"),
    "target_top_ids": ("<i4", "NK"),
    "target_top_logprobs": ("<f2", "NK"),
    "target_tail_mass": ("<f4", "N"),
    "draft_token_ids": ("<i4", "N"),
    "accepted": ("<i1", "N"),
    "draft_logprobs": ("<f2", "N"),
    "processed_top_probs": ("<f2", "NK"),
    "branch_positions": ("<i4", "R"),
    "branch_lengths": ("<i4", "R"),
    "branch_token_ids": ("<i4", "M"),
    "branch_top_ids": ("<i4", "MK"),
    "branch_top_logprobs": ("<f2", "MK"),
    "branch_tail_mass": ("<f4", "M"),
    "hidden": ("<u2", "TH"),
}
_BRANCH = tuple(name for name in _ARRAYS if name.startswith("branch_"))
_OPTIONAL = frozenset({"processed_top_probs", "hidden", *_BRANCH})
_WIDE = {"K": "top", "H": "hidden_size"}  # axes, and the field with their length
# Valid values, with float16's slack. A draft's own values may be invalid.
_RANGES: dict[str, tuple[float, float]] = {
    "target_top_logprobs": (-math.inf, 0.01),
    "target_tail_mass": (-0.01, 1.01),
    "processed_top_probs": (-0.01, 1.01),
    "branch_top_logprobs": (-math.inf, 0.01),
    "branch_tail_mass": (-0.01, 1.01),
}


class RecordError(ValueError):
    """Bytes that are not a replay record of this schema."""


class RecordValueError(RecordError):
    """A record with impossible numbers: nan, infinite, or not probabilities."""


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """One finished request: P prompt tokens, N emitted positions, K recorded tokens each.

    Attributes:
        request_id: of the request; argument of :meth:`ReplayShard.delete`.
        topic: chosen by the router.
        expert: the draft model.
        weight_version: of that draft when the request ended.
        created: unix time, seconds.
        temperature: of the request; 0 is greedy.
        top_p: of the request.
        top_k: of the request; 0 is off.
        prompt_token_ids: int32 ``[P]``.
        output_token_ids: int32 ``[N]``, every emitted position in order.
        target_top_ids: int32 ``[N, K]``.
        target_top_logprobs: float16 ``[N, K]``, natural log p at T = 1, descending.
        target_tail_mass: float32 ``[N]``, 1 - sum(exp(top)).
        draft_token_ids: int32 ``[N]``, the proposed token, -1 if none.
        accepted: int8 ``[N]``, 1 accepted, 0 rejected, -1 not drafted.
        draft_logprobs: float16 ``[N]``, of the drafted token by its draft at T = 1, nan if none.
        processed_top_probs: float16 ``[N, K]``, p after temperature, top_k and top_p at
            ``target_top_ids``; None for a greedy request, and for a constrained one, which samples
            from what its grammar leaves.
        branch_positions: int32 ``[R]``, ascending, the rejected positions that have a branch;
            None, like all of ``branch_*``, if none was recorded.
        branch_lengths: int32 ``[R]``, tokens of each branch, at least 1.
        branch_token_ids: int32 ``[M]``, the draft's tokens from each rejected one on, one branch
            after the other; M is the sum of the lengths.
        branch_top_ids: int32 ``[M, K]``, the target's distribution after each of these tokens
            (that of the rejected position itself is among the emitted ones),
        branch_top_logprobs: float16 ``[M, K]``, and
        branch_tail_mass: float32 ``[M]``, like those of emitted positions.
        hidden: uint16 ``[T, H]``, bits of the target's bfloat16 hidden states at T positions of
            prompt and output from ``hidden_start`` on; None if no draft reads them.
        hidden_start: a position.
        first_prompt: digest of the first prompt of its conversation; None is its own.
    """

    request_id: str
    topic: str
    expert: str
    weight_version: int
    created: float
    temperature: float
    top_p: float
    top_k: int
    prompt_token_ids: NDArray[np.int32]
    output_token_ids: NDArray[np.int32]
    target_top_ids: NDArray[np.int32]
    target_top_logprobs: NDArray[np.float16]
    target_tail_mass: NDArray[np.float32]
    draft_token_ids: NDArray[np.int32]
    accepted: NDArray[np.int8]
    draft_logprobs: NDArray[np.float16]
    processed_top_probs: NDArray[np.float16] | None = None
    branch_positions: NDArray[np.int32] | None = None
    branch_lengths: NDArray[np.int32] | None = None
    branch_token_ids: NDArray[np.int32] | None = None
    branch_top_ids: NDArray[np.int32] | None = None
    branch_top_logprobs: NDArray[np.float16] | None = None
    branch_tail_mass: NDArray[np.float32] | None = None
    hidden: NDArray[np.uint16] | None = None
    hidden_start: int = 0
    first_prompt: int | None = None

    @property
    def conversation(self) -> int:
        """Digest of its conversation's first prompt, by which its records stay together."""
        own = self.first_prompt
        return prompt_digest(self.prompt_token_ids) if own is None else own

    @property
    def greedy(self) -> bool:
        """Whether the request was decoded greedily."""
        return self.temperature == 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        arrays = (getattr(self, name) for name in _ARRAYS)
        return sum(array.nbytes for array in arrays if array is not None)

    def branches(self) -> Iterator[tuple[int, slice]]:
        """The rejected position of each branch, and its rows of the ``branch_*`` arrays."""
        if self.branch_positions is None or self.branch_lengths is None:
            return
        end = 0
        for position, length in zip(
            self.branch_positions.tolist(), self.branch_lengths.tolist(), strict=True
        ):
            end += length
            yield position, slice(end - length, end)


def fit(prompt: int, outputs: int, max_length: int) -> tuple[int, int]:
    """Truncate: the numbers of last prompt tokens and first answer tokens to keep.

    The answer has the labels, so it keeps at least half the room, more with a short prompt.

    Args:
        prompt: tokens of the prompt, at least 1.
        outputs: tokens of the answer, at least 1.
        max_length: of the input, without the answer's last token; at least 1.
    """
    room = max_length + 1
    kept = min(outputs, max(room - prompt, room // 2))
    return min(prompt, room - kept), kept


def encode(record: ReplayRecord) -> bytes:
    """Msgpack bytes of a record.

    Raises:
        RecordError: the arrays do not fit together.
    """
    fields: dict[str, Any] = {"schema": SCHEMA_VERSION}
    for name, kind in _SCALARS.items():
        fields[name] = kind(getattr(record, name))
    fields["hidden_start"] = record.hidden_start
    if record.first_prompt is not None:
        fields["first_prompt"] = record.first_prompt
    arrays: dict[str, NDArray[Any] | None] = {}
    for name, (dtype, axes) in _ARRAYS.items():
        value = getattr(record, name)
        if value is None and name in _OPTIONAL:
            arrays[name] = None
            continue
        array = np.ascontiguousarray(value, dtype=dtype)
        if array.ndim != len(axes):
            raise RecordError(f"record: {name} has {array.ndim} axes, not {len(axes)}")
        arrays[name], fields[name] = array, array.tobytes()
    fields["top"] = int(np.shape(record.target_top_ids)[1])
    if record.hidden is not None:
        fields["hidden_size"] = int(record.hidden.shape[1])
    _check_shapes(arrays)
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def decode(data: bytes) -> ReplayRecord:
    """Read what :func:`encode` wrote; the arrays are read-only views of ``data``.

    Raises:
        RecordError: another schema version, a missing field, a wrong type or shape.
        RecordValueError: impossible numbers.
    """
    try:
        fields = msgpack.unpackb(data, raw=False)
    except Exception as error:
        raise RecordError(f"record: not msgpack ({error})") from error
    if not isinstance(fields, dict):
        raise RecordError("record: not a map")
    version = fields.get("schema")
    if type(version) is not int or version not in _READABLE:
        raise RecordError(f"record: schema {version!r}, this code reads up to {SCHEMA_VERSION}")
    arrays = {name: _array(fields, name) for name in _ARRAYS}
    _check_shapes(arrays)
    values: dict[str, Any] = {name: _scalar(fields, name, kind) for name, kind in _SCALARS.items()}
    values["hidden_start"] = _scalar({"hidden_start": 0} | fields, "hidden_start", int)
    if "first_prompt" in fields:
        values["first_prompt"] = _scalar(fields, "first_prompt", int)
    _check_values(values, arrays)
    return ReplayRecord(**(values | arrays))


def _scalar(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise RecordError(f"record: {name} must be {kind.__name__}")
    return value


def _array(fields: Mapping[str, Any], name: str) -> NDArray[Any] | None:
    dtype, axes = _ARRAYS[name]
    value = fields.get(name)
    if value is None and name in _OPTIONAL:
        return None
    if not isinstance(value, bytes):
        raise RecordError(f"record: {name} must be bytes")
    columns = _columns(fields, _WIDE[axes[1]]) if len(axes) == 2 else 1
    if len(value) % (np.dtype(dtype).itemsize * columns):
        raise RecordError(f"record: {name} has a broken length")
    array = np.frombuffer(value, dtype=dtype)
    return array.reshape(-1, columns) if len(axes) == 2 else array


def _columns(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise RecordError(f"record: {name} must be a positive integer")
    return value


def _check_shapes(arrays: Mapping[str, NDArray[Any] | None]) -> None:
    """Check that all arrays agree on N, K, R and M."""
    reference = arrays["target_top_ids"]
    assert reference is not None
    sizes = dict(zip("NK", reference.shape, strict=True))
    for name, array in arrays.items():
        if array is None:
            continue
        # the first array with an axis defines its length
        expected = tuple(
            sizes.setdefault(axis, length)
            for axis, length in zip(_ARRAYS[name][1], array.shape, strict=True)
        )
        if array.shape != expected:
            raise RecordError(f"record: {name} has shape {array.shape}, not {expected}")
    _check_branches([arrays[name] for name in _BRANCH], sizes)


def _check_branches(parts: Sequence[NDArray[Any] | None], sizes: Mapping[str, int]) -> None:
    present = [part for part in parts if part is not None]
    if not present:
        return
    if len(present) < len(parts):
        raise RecordError("record: branch_* arrays come all together")
    positions, lengths = present[:2]
    inside = bool(((positions >= 0) & (positions < sizes["N"])).all())
    if not inside or not bool((np.diff(positions) > 0).all()):
        raise RecordError("record: branch_positions must ascend among the emitted ones")
    if not bool((lengths > 0).all()) or int(lengths.sum()) != sizes["M"]:
        raise RecordError("record: branch_lengths must be positive and sum to all tokens")


def _check_values(values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any] | None]) -> None:
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RecordValueError(f"record: {name} is {value}")
    for name, (low, high) in _RANGES.items():
        array = arrays[name]
        # nan compares false
        if array is not None and not bool(((array >= low) & (array <= high)).all()):
            raise RecordValueError(f"record: {name} does not lie in {low} to {high}")


def prompt_digest(prompt_token_ids: Sequence[int] | NDArray[np.int32]) -> int:
    """Hash of a prompt, below 2**64, the same in every process."""
    ids = np.asarray(prompt_token_ids, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(ids, digest_size=8).digest(), "little")


def is_held_out(conversation: int, fraction: float) -> bool:
    """Whether records of this conversation are for evaluation and not for training.

    Args:
        conversation: see ReplayRecord.
        fraction: of all conversations that are held out, 0 to 1.
    """
    return conversation < fraction * 2.0**64
