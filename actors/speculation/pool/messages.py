"""Messages between targets and drafters: versioned msgpack frames.

A frame is a msgpack array ``[version, kind, fields...]``; arrays inside are little-endian bytes
with their shape. Only new tokens of a sequence are sent, and its sampling parameters once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import msgpack
import numpy as np
from numpy.typing import NDArray

from paceline.actors.engine.request import SamplingParams

VERSION = 2
_BIG_INTEGER = 1  # msgpack extension: a decimal number beyond 64 bits

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


class ProtocolError(ValueError):
    """A frame or message that violates the protocol."""


@dataclass(frozen=True, slots=True)
class Session:
    """Address and key of a target's session with a drafter; sent through Serve, not the socket.

    ``unix`` is a socket on the drafter's node; ``host`` and ``port`` are None if the drafter does
    not listen on tcp. ``key`` signs the server's challenge.
    """

    name: str
    key: bytes = field(repr=False)
    unix: bytes
    host: str | None
    port: int | None


@dataclass(frozen=True, slots=True)
class Challenge:
    """The server's first message: a nonce to sign with the session's key."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class Authenticate:
    """The client's reply to a challenge; see :func:`sign`."""

    session: str
    signature: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server's reply to valid credentials.

    Attributes:
        epoch: identifies the server's process.
        weight_versions: of its drafts.
        hidden_size: H, of the hidden states that its drafts read; 0 if they read none.
    """

    epoch: int
    weight_versions: Mapping[str, int]
    hidden_size: int = 0


@dataclass(frozen=True, slots=True)
class DraftRequestRow:
    """A sequence to draft for.

    The server should hold ``num_cached_tokens`` of it, and ``tokens`` follow them; 0 starts the
    sequence and brings ``sampling``, which is None afterwards. With 0 for ``num_draft_tokens`` more
    tokens are to come, and nothing is drafted yet. ``hidden`` are the target's hidden states of the
    positions before the tokens, little-endian bfloat16, see ``num_states``.
    """

    request_id: str
    draft: str
    num_cached_tokens: int
    tokens: tuple[int, ...]
    num_output: int
    num_draft_tokens: int
    sampling: SamplingParams | None
    hidden: bytes = b""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A round's request; ``draft_ahead`` allows drafting beyond the response."""

    round: int
    rows: tuple[DraftRequestRow, ...]
    draft_ahead: bool = True


@dataclass(frozen=True, slots=True)
class DraftResponse:
    """Proposals for the rows of a DraftRequest, in their order.

    Attributes:
        epoch: of the server, as in its Welcome.
        round: of the request.
        weight_versions: of every draft that the expert serves, as used for this response.
        unknown_rows: indices of rows to send whole in the next round.
        num_ahead_hits: rows served from tokens drafted ahead.
        num_drafted: int32 ``[B]``.
        token_ids: int32 ``[B, k]``.
        token_probs: float32 ``[B, k]``.
        support_ids: int32 ``[B, k, S]``.
        support_probs: float32 ``[B, k, S]``.
    """

    epoch: int
    round: int
    weight_versions: Mapping[str, int]
    unknown_rows: tuple[int, ...]
    num_ahead_hits: int
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
    """A request for a Pong with the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The reply of a live server, with its present weight versions."""

    number: int
    epoch: int
    weight_versions: Mapping[str, int]


Message = Challenge | Authenticate | Welcome | DraftRequest | DraftResponse | Release | Ping | Pong
_KINDS: tuple[type[Any], ...] = get_args(Message)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}


def sign(key: bytes, nonce: bytes) -> bytes:
    """Return the HMAC-SHA256 of a challenge's nonce under a session's key."""
    return hmac.digest(key, nonce, hashlib.sha256)


def encode(message: Message) -> bytes:
    """Encode a message as a frame's payload."""
    values = [getattr(message, field.name) for field in dataclasses.fields(message)]
    payload: bytes = msgpack.packb([VERSION, _NUMBER[type(message)], *values], default=_pack)
    return payload


def decode(payload: bytes) -> Message:
    """Decode a frame's payload.

    Raises:
        ProtocolError: a frame of another version, or a malformed one.
    """
    try:
        version, kind, *values = msgpack.unpackb(
            payload, ext_hook=_unpack_extension, strict_map_key=False, use_list=False
        )
        if version != VERSION:
            raise ProtocolError(f"a frame of version {version}, this side speaks {VERSION}")
        message: Message = _DECODERS.get(_KINDS[kind], _KINDS[kind])(*values)
    except ProtocolError:
        raise
    except Exception as error:  # any bytes may arrive
        raise ProtocolError(f"not a frame: {error}") from error
    return message


def _pack(value: Any) -> Any:
    """Reduce a value to what msgpack has a form for."""
    if isinstance(value, DraftRequestRow):
        return [
            value.request_id,
            value.draft,
            value.num_cached_tokens,
            np.asarray(value.tokens, dtype="<i4").tobytes(),
            value.num_output,
            value.num_draft_tokens,
            value.sampling,
            value.hidden,
        ]
    if isinstance(value, np.ndarray):
        return [value.shape, value.astype(f"<{value.dtype.kind}4", copy=False).tobytes()]
    if isinstance(value, SamplingParams):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, int):  # a seed may be any
        return msgpack.ExtType(_BIG_INTEGER, str(value).encode())
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _unpack_extension(code: int, data: bytes) -> int:
    if code != _BIG_INTEGER:
        raise ProtocolError(f"unknown extension {code}")
    return int(data)


def _decode_authenticate(session: Any, signature: Any) -> Authenticate:
    if not isinstance(session, str) or not isinstance(signature, bytes):
        raise ProtocolError("malformed credentials")
    return Authenticate(session, signature)


def _decode_request(number: int, rows: tuple[Any, ...], draft_ahead: bool) -> DraftRequest:
    return DraftRequest(number, tuple(_decode_row(*row) for row in rows), draft_ahead)


def _decode_row(
    request_id: str, draft: str, num_cached_tokens: Any, tokens: bytes, *rest: Any
) -> DraftRequestRow:
    num_output, num_draft_tokens, sampling, hidden = rest
    if not isinstance(hidden, bytes):
        raise ProtocolError("hidden states that are no bytes")
    return DraftRequestRow(
        request_id=request_id,
        draft=draft,
        num_cached_tokens=int(num_cached_tokens),
        tokens=tuple(np.frombuffer(tokens, dtype="<i4").tolist()),
        num_output=int(num_output),
        num_draft_tokens=int(num_draft_tokens),
        sampling=None if sampling is None else SamplingParams(**sampling),
        hidden=hidden,
    )


def _decode_response(*values: Any) -> DraftResponse:
    epoch, number, versions, unknown_rows, num_ahead_hits, *arrays = values
    dtypes = ("<i4", "<i4", "<f4", "<i4", "<f4")
    parts = [_array(*part) for part in zip(arrays, dtypes, strict=True)]
    response = DraftResponse(epoch, number, versions, unknown_rows, num_ahead_hits, *parts)
    rows, steps, width = response.support_ids.shape
    shapes_fit = (
        response.num_drafted.shape == (rows,)
        and response.token_ids.shape == response.token_probs.shape == (rows, steps)
        and response.support_probs.shape == (rows, steps, width)
    )
    if not shapes_fit:
        raise ProtocolError("a response whose arrays do not fit together")
    return response


def _array(part: Any, dtype: str) -> NDArray[Any]:
    shape, data = part
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_DECODERS: dict[type[Any], Callable[..., Any]] = {
    Authenticate: _decode_authenticate,
    DraftRequest: _decode_request,
    DraftResponse: _decode_response,
}
