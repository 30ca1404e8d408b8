"""What targets and experts say to each other: versioned msgpack frames.

A frame is a msgpack array ``[version, kind, fields...]``; arrays inside are their little-endian
bytes with the shape beside them. Only what a draft needs travels: new tokens of a sequence, not
the sequence, and its sampling parameters once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from paceline.actors.engine.request import SamplingParams

MAX_FRAME = 1 << 26


VERSION = 1
_BIG_INTEGER = 1  # msgpack extension: a decimal number beyond 64 bits

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


class WireError(ValueError):
    """A frame that this side cannot read."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """The server's first frame: ``nonce`` is to be signed with the lease's key."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """The client's answer to a challenge; see :func:`sign`."""

    lease: str
    signature: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection stands; ``epoch`` names this life of the server."""

    epoch: int
    weight_versions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AskRow:
    """One sequence that wants draft tokens.

    ``base`` tokens of it should be known to the server, and ``tokens`` follow them; base 0
    begins anew. ``sampling`` comes with base 0 and is None afterwards.
    """

    request_id: str
    draft: str
    base: int
    tokens: tuple[int, ...]
    num_output: int
    num_draft_tokens: int
    sampling: SamplingParams | None


@dataclass(frozen=True, slots=True)
class Ask:
    """A round's question; ``ahead`` False asks the server not to draft beyond its answer."""

    round: int
    rows: tuple[AskRow, ...]
    ahead: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """What an expert proposes for the rows of an Ask, in their order.

    Attributes:
        epoch: of the server, as in its Welcome.
        round: of the Ask.
        weight_versions: of every draft that the expert serves, as it proposed with them.
        unknown: indices of rows whose sequence has to be sent whole.
        ahead: rows answered with what had been drafted ahead.
        num_drafted: int32 ``[B]``.
        token_ids: int32 ``[B, k]``.
        token_probs: float32 ``[B, k]``.
        support_ids: int32 ``[B, k, S]``.
        support_probs: float32 ``[B, k, S]``.
    """

    epoch: int
    round: int
    weight_versions: Mapping[str, int]
    unknown: tuple[int, ...]
    ahead: int
    num_drafted: Int32
    token_ids: Int32
    token_probs: Float32
    support_ids: Int32
    support_probs: Float32


@dataclass(frozen=True, slots=True)
class Release:
    """Sequences that have ended."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a Pong with the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The server's thread is alive, and what it would propose with."""

    number: int
    epoch: int
    weight_versions: Mapping[str, int]


Message = Challenge | Hello | Welcome | Ask | Answer | Release | Ping | Pong
_KINDS: tuple[type[Any], ...] = (Challenge, Hello, Welcome, Ask, Answer, Release, Ping, Pong)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}


def sign(key: bytes, nonce: bytes) -> bytes:
    """HMAC-SHA256 of a challenge's nonce under a lease's key."""
    return hmac.digest(key, nonce, hashlib.sha256)


def encode(message: Message) -> bytes:
    """A message as a frame's payload."""
    if isinstance(message, Ask):
        fields: list[Any] = [message.round, [_pack_row(row) for row in message.rows], message.ahead]
    else:
        fields = [_plain(getattr(message, field.name)) for field in dataclasses.fields(message)]
    payload: bytes = msgpack.packb(
        [VERSION, _NUMBER[type(message)], *fields], default=_pack_unusual
    )
    return payload


def decode(payload: bytes) -> Message:
    """The message in a frame's payload.

    Raises:
        WireError: for a frame of another version, or one that is not whole.
    """
    try:
        version, kind, *fields = msgpack.unpackb(
            payload, ext_hook=_unpack_unusual, strict_map_key=False, use_list=False
        )
        if version != VERSION:
            raise WireError(f"a frame of version {version}, this side speaks {VERSION}")
        message: Message = _READERS.get(_KINDS[kind], _KINDS[kind])(*fields)
    except WireError:
        raise
    except Exception as error:  # whatever bytes from outside may lead to
        raise WireError(f"not a frame: {error}") from error
    return message


def _pack_row(row: AskRow) -> list[Any]:
    sampling = None if row.sampling is None else _sampling_fields(row.sampling)
    return [
        row.request_id,
        row.draft,
        row.base,
        np.asarray(row.tokens, dtype="<i4").tobytes(),
        row.num_output,
        row.num_draft_tokens,
        sampling,
    ]


def _read_row(fields: tuple[Any, ...]) -> AskRow:
    request_id, draft, base, tokens, num_output, num_draft_tokens, sampling = fields
    return AskRow(
        request_id=request_id,
        draft=draft,
        base=int(base),
        tokens=tuple(np.frombuffer(tokens, dtype="<i4").tolist()),
        num_output=int(num_output),
        num_draft_tokens=int(num_draft_tokens),
        sampling=None if sampling is None else SamplingParams(**sampling),
    )


def _sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    return {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}


def _read_ask(number: int, rows: tuple[Any, ...], ahead: bool) -> Ask:
    return Ask(round=number, rows=tuple(_read_row(row) for row in rows), ahead=ahead)


def _read_answer(*fields: Any) -> Answer:
    epoch, number, versions, unknown, ahead, *arrays = fields
    parts = [
        _array(part, kind) for part, kind in zip(arrays, ("i", "i", "f", "i", "f"), strict=True)
    ]
    answer = Answer(epoch, number, versions, unknown, ahead, *parts)
    rows, steps, width = answer.support_ids.shape
    shapes = (
        answer.num_drafted.shape == (rows,)
        and answer.token_ids.shape == answer.token_probs.shape == (rows, steps)
        and answer.support_probs.shape == (rows, steps, width)
    )
    if not shapes:
        raise WireError("an answer whose arrays do not fit together")
    return answer


_READERS: dict[type[Any], Callable[..., Any]] = {Ask: _read_ask, Answer: _read_answer}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        little = value.astype("<i4" if value.dtype.kind == "i" else "<f4", copy=False)
        return [list(value.shape), little.tobytes()]
    return dict(value) if isinstance(value, Mapping) else value


def _array(part: Any, kind: str) -> NDArray[Any]:
    shape, data = part
    return np.frombuffer(data, dtype=f"<{kind}4").reshape(shape)


def _pack_unusual(value: Any) -> Any:
    """Integers beyond 64 bits (a seed may be any), which msgpack has no form for."""
    if isinstance(value, int):
        return msgpack.ExtType(_BIG_INTEGER, str(value).encode())
    if isinstance(value, frozenset | set):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _unpack_unusual(code: int, data: bytes) -> Any:
    if code != _BIG_INTEGER:
        raise WireError(f"unknown extension {code}")
    return int(data)


@dataclass(frozen=True, slots=True)
class Lease:
    """What a client needs to connect; travels through Serve, never over the socket.

    ``unix`` is the name of a socket on the expert's node; ``host`` and ``port`` are None where
    the expert does not listen on tcp. ``key`` signs the server's challenge.
    """

    name: str
    key: bytes = field(repr=False)
    unix: bytes
    host: str | None
    port: int | None
