"""Encoding and framing of messages."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.request import SamplingParams
from paceline.actors.speculation.pool import messages as wire
from paceline.actors.speculation.pool.connection import (
    MAX_UNAUTHENTICATED_FRAME_BYTES,
    Connection,
    ConnectionLostError,
)

NAMES = st.sampled_from(["a", "a@0", "sql", "naïve 漢字", "chatcmpl-1f-0", "x" * 60])
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 1 << 20),
    temperature=st.floats(0.0, 2.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 1000),
    seed=st.none() | st.integers() | st.integers(-(1 << 80), 1 << 80),
    stop=st.lists(st.sampled_from(["", "\n", "漢"]), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    repetition_penalty=st.floats(0.5, 2.0),
    logit_bias=st.lists(st.tuples(st.integers(0, 300), st.floats(-100.0, 100.0)), max_size=3).map(
        tuple
    ),
    all_stop_token_ids=st.lists(st.integers(0, 300), max_size=3).map(tuple),
)
ROWS = st.builds(
    wire.DraftRequestRow,
    request_id=NAMES,
    draft=NAMES,
    num_cached_tokens=st.integers(0, 1 << 20),
    tokens=st.lists(st.integers(0, (1 << 31) - 1), max_size=20).map(tuple),
    num_output=st.integers(0, 1 << 20),
    num_draft_tokens=st.integers(0, 32),
    sampling=st.none() | SAMPLING,
    hidden=st.binary(max_size=64),
)
VERSIONS = st.dictionaries(NAMES, st.integers(0, 1 << 40), max_size=3)
NUMBERS = st.integers(0, 1 << 62)
MESSAGES = st.one_of(
    st.builds(wire.Challenge, st.binary(max_size=32)),
    st.builds(wire.Authenticate, NAMES, st.binary(max_size=32)),
    st.builds(wire.Welcome, NUMBERS, VERSIONS, st.integers(0, 1 << 16)),
    st.builds(wire.DraftRequest, NUMBERS, st.lists(ROWS, max_size=4).map(tuple), st.booleans()),
    st.builds(wire.Release, st.lists(NAMES, max_size=3).map(tuple)),
    st.builds(wire.Ping, NUMBERS),
    st.builds(wire.Pong, NUMBERS, NUMBERS, VERSIONS),
)


@given(MESSAGES)
def test_every_message_round_trips(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


@given(st.integers(0, 4), st.integers(0, 5), st.integers(0, 6), st.randoms(use_true_random=False))
def test_a_response_round_trips_to_the_bit(rows: int, steps: int, width: int, random: Any) -> None:
    generator = np.random.default_rng(random.randrange(1 << 32))
    answer = wire.DraftResponse(
        epoch=7,
        round=9,
        weight_versions={"a": 3, "a@0": 0},
        unknown_rows=tuple(range(rows // 2)),
        num_ahead_hits=1,
        num_drafted=generator.integers(0, steps + 1, rows).astype(np.int32),
        token_ids=generator.integers(0, 1 << 30, (rows, steps)).astype(np.int32),
        token_probs=generator.random((rows, steps)).astype(np.float32),
        support_ids=generator.integers(0, 1 << 30, (rows, steps, width)).astype(np.int32),
        support_probs=generator.random((rows, steps, width)).astype(np.float32),
    )
    back = wire.decode(wire.encode(answer))
    assert isinstance(back, wire.DraftResponse)
    for field in dataclasses.fields(answer):
        sent, got = getattr(answer, field.name), getattr(back, field.name)
        assert np.array_equal(sent, got) if isinstance(sent, np.ndarray) else sent == got


@given(st.binary(max_size=200))
def test_invalid_frames_are_rejected(data: bytes) -> None:
    try:
        message = wire.decode(data)
    except wire.ProtocolError:
        return
    assert wire.decode(wire.encode(message)) == message


def test_another_version_is_rejected() -> None:
    frame = msgpack.unpackb(wire.encode(wire.Ping(1)))
    with pytest.raises(wire.ProtocolError, match="version 99"):
        wire.decode(msgpack.packb([99, *frame[1:]]))


def test_arrays_of_unequal_shapes_are_rejected() -> None:
    empty = np.zeros((2, 1), np.int32)
    answer = wire.DraftResponse(
        1, 1, {}, (), 0, np.ones(3, np.int32), empty, empty.astype(np.float32),
        np.zeros((2, 1, 1), np.int32), np.zeros((2, 1, 1), np.float32),
    )  # fmt: skip
    with pytest.raises(wire.ProtocolError, match="do not fit"):
        wire.decode(wire.encode(answer))


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=8), st.integers(1, 50))
def test_frames_survive_being_cut_anywhere(payloads: list[bytes], piece: int) -> None:
    left, right = socket.socketpair()
    sender, receiver = Connection(left), Connection(right)
    try:
        for payload in payloads:
            sender.send_frame(payload)
        data = right.recv(1 << 20)
        again, back = socket.socketpair()
        with again, back:
            receiver.close()
            receiver, got = Connection(back), []
            for start in range(0, len(data), piece):
                again.sendall(data[start : start + piece])
                got += receiver.receive_frames()
            assert got == payloads
    finally:
        sender.close()
        receiver.close()


def test_a_peer_that_does_not_read_never_blocks_its_sender() -> None:
    left, right = socket.socketpair()
    sender, receiver = Connection(left), Connection(right)
    payload = bytes(1 << 20)
    for _ in range(4):
        sender.send_frame(payload)
    assert sender.has_unsent
    got: list[bytes] = []
    while len(got) < 4:
        sender.flush()
        got += receiver.receive_frames()
    assert got == [payload] * 4
    sender.close()
    with pytest.raises(ConnectionLostError):
        receiver.receive_frames()
    receiver.close()


def test_a_frame_beyond_the_limit_ends_the_connection() -> None:
    left, right = socket.socketpair()
    sender, receiver = Connection(left), Connection(right, max_frame_bytes=10)
    sender.send_frame(bytes(11))
    with pytest.raises(ConnectionLostError, match="11 bytes"):
        receiver.receive_frames()
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    ("limit", "cut"),
    [(1000, 1002), (MAX_UNAUTHENTICATED_FRAME_BYTES, MAX_UNAUTHENTICATED_FRAME_BYTES + 2)],
)
def test_a_frame_of_the_largest_size_comes_whole_wherever_it_is_cut(limit: int, cut: int) -> None:
    """The four bytes of its length come on top of the limit."""
    left, right = socket.socketpair()
    payload = (bytes(range(250)) * 5)[:limit]
    frame = limit.to_bytes(4, "little") + payload
    receiver = Connection(right, max_frame_bytes=limit)
    with left:
        left.sendall(frame[:cut])
        assert receiver.receive_frames() == []
        left.sendall(frame[cut:] + frame)
        assert [*receiver.receive_frames(), *receiver.receive_frames()] == [payload] * 2
    receiver.close()


def test_a_tcp_peer_on_a_lost_machine_is_noticed_within_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection(socket.create_connection(listener.getsockname()))
        sock = connection._socket
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
        probes, idle, apart = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPCNT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        )
        assert idle + probes * apart <= 20
        connection.close()
