"""The replay record: what one finished request leaves behind, and its wire format.

For every emitted position (accepted, recovered, bonus or plainly decoded alike) it holds the
target's top-K distribution, so that a draft learns without running the target again, and a
draft that is switched off still has something to learn from. Where it was asked for, it also holds
what the target said behind each rejected draft token: contexts that the draft itself led to.
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

_SYNTHETIC = "synthetic:"


def belongs(record: str, answer: str) -> bool:
    """Whether a record is of an answer, or of a synthetic prompt made from one.

    An answer's record has its name, or that and the number of a choice.

    Args:
        record: its request_id.
        answer: as clients know it.
    """
    source = source_id(record)
    name, dash, number = source.rpartition("-")
    return answer in (record, source) or (bool(dash) and name == answer and number.isdecimal())


def synthetic_id(source: str, mark: str) -> str:
    """The request_id of a synthetic prompt.

    Args:
        source: request_id of the record that its beginning is from.
        mark: unique among those of one source; without a colon.
    """
    return f"{_SYNTHETIC}{mark}:{source}"


def is_synthetic(record: str) -> bool:
    """Whether a record is of a synthetic prompt, by its request_id."""
    return record.startswith(_SYNTHETIC)


def source_id(record: str) -> str:
    """The request_id that a synthetic record was made from; any other record's own."""
    return record.split(":", 2)[2] if is_synthetic(record) and record.count(":") > 1 else record


SCHEMA_VERSION = 2
_READABLE = (1, 2)  # 1 knew no branches

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
# Little-endian on the wire; the second entry says which axes the array has.
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
}
_BRANCH = tuple(name for name in _ARRAYS if name.startswith("branch_"))
_OPTIONAL = frozenset({"processed_top_probs", *_BRANCH})
# What these may hold; the slack is float16's. A draft's own figures may be as broken as it is.
_RANGES: dict[str, tuple[float, float]] = {
    "target_top_logprobs": (-math.inf, 0.01),
    "target_tail_mass": (-0.01, 1.01),
    "processed_top_probs": (-0.01, 1.01),
    "branch_top_logprobs": (-math.inf, 0.01),
    "branch_tail_mass": (-0.01, 1.01),
}


class RecordError(ValueError):
    """Bytes that are no replay record of this schema."""


class RecordValueError(RecordError):
    """A record whose numbers cannot be: nan, infinite, or no probabilities."""


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """One finished request: P prompt tokens, N emitted positions, K recorded tokens each.

    Attributes:
        request_id: of the request; what :meth:`ReplayShard.delete` takes.
        topic: topic that the router chose.
        expert: draft that proposed.
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
        draft_token_ids: int32 ``[N]``, the token that the draft proposed, -1 where none.
        accepted: int8 ``[N]``, 1 accepted, 0 rejected, -1 not drafted.
        draft_logprobs: float16 ``[N]``, log q of the drafted token, nan where none.
        processed_top_probs: float16 ``[N, K]``, p after temperature, top_k and top_p at
            ``target_top_ids``; None for a greedy request.
        branch_positions: int32 ``[R]``, ascending, the rejected positions that have a branch;
            None, as all of ``branch_*``, where none was recorded.
        branch_lengths: int32 ``[R]``, tokens of each branch, at least 1.
        branch_token_ids: int32 ``[M]``, the draft's tokens from each rejected one on, one branch
            after the other; M is the sum of the lengths.
        branch_top_ids: int32 ``[M, K]``, the target's view of what follows each of these tokens
            (not of the rejected position itself, which is among the emitted ones),
        branch_top_logprobs: float16 ``[M, K]``, and
        branch_tail_mass: float32 ``[M]``, as those of emitted positions.
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

    @property
    def greedy(self) -> bool:
        """Whether the request took the most likely token everywhere."""
        return self.temperature == 0.0

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


def encode(record: ReplayRecord) -> bytes:
    """Msgpack bytes of a record.

    Raises:
        RecordError: where the arrays do not fit together.
    """
    fields: dict[str, Any] = {"schema": SCHEMA_VERSION}
    for name, kind in _SCALARS.items():
        fields[name] = kind(getattr(record, name))
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
    _check_shapes(arrays)
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def decode(data: bytes) -> ReplayRecord:
    """Read what :func:`encode` wrote; the arrays are read-only views of ``data``.

    Raises:
        RecordError: another schema version, a missing field, a wrong type or shape.
        RecordValueError: numbers that would spoil whatever is computed from them.
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
    top = fields.get("top")
    if type(top) is not int or top < 1:
        raise RecordError("record: top must be a positive integer")
    arrays = {name: _array(fields, name, top) for name in _ARRAYS}
    _check_shapes(arrays)
    values: dict[str, Any] = {name: _scalar(fields, name, kind) for name, kind in _SCALARS.items()}
    _check_values(values, arrays)
    return ReplayRecord(**(values | arrays))


def _scalar(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise RecordError(f"record: {name} must be {kind.__name__}")
    return value


def _array(fields: Mapping[str, Any], name: str, top: int) -> NDArray[Any] | None:
    dtype, axes = _ARRAYS[name]
    value = fields.get(name)
    if value is None and name in _OPTIONAL:
        return None
    if not isinstance(value, bytes):
        raise RecordError(f"record: {name} must be bytes")
    width = np.dtype(dtype).itemsize * (top if len(axes) == 2 else 1)
    if len(value) % width:
        raise RecordError(f"record: {name} has a broken length")
    array = np.frombuffer(value, dtype=dtype)
    return array.reshape(-1, top) if len(axes) == 2 else array


def _check_shapes(arrays: Mapping[str, NDArray[Any] | None]) -> None:
    """Every array must agree on N, and every wide one on K; branches on R and M."""
    reference = arrays["target_top_ids"]
    assert reference is not None
    sizes = dict(zip("NK", reference.shape, strict=True))
    for name, array in arrays.items():
        if array is None:
            continue
        # what names an axis first decides its length
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


def is_held_out(prompt_token_ids: Sequence[int] | NDArray[np.int32], fraction: float) -> bool:
    """Whether records of this prompt judge drafts instead of teaching them.

    The same prompt falls on the same side in every process and for ever.

    Args:
        prompt_token_ids: the prompt.
        fraction: of all prompts that are held out, 0 to 1.
    """
    ids = np.asarray(prompt_token_ids, dtype="<i4").tobytes()
    digest = hashlib.blake2b(ids, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64
