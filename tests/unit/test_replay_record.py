"""The replay record and its wire format."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import msgpack
import numpy as np
import pytest
from replay_samples import make_record

from paceline.actors.replay.record import (
    SCHEMA_VERSION,
    RecordError,
    RecordValueError,
    ReplayRecord,
    decode,
    encode,
    is_held_out,
)


def assert_same(left: ReplayRecord, right: ReplayRecord) -> None:
    for field in dataclasses.fields(ReplayRecord):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_round_trip(temperature: float) -> None:
    record = make_record(temperature=temperature)
    assert (record.processed_top_probs is None) == record.greedy
    assert_same(record, decode(encode(record)))


def test_empty_answer_round_trips() -> None:
    assert decode(encode(make_record(length=0))).output_token_ids.shape == (0,)


def test_other_schema_is_refused() -> None:
    fields = msgpack.unpackb(encode(make_record()))
    fields["schema"] = SCHEMA_VERSION + 1
    with pytest.raises(RecordError, match="schema 3"):
        decode(msgpack.packb(fields))


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"schema": 1})])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode(data)


@pytest.mark.parametrize("name", ["target_top_logprobs", "accepted", "output_token_ids"])
def test_truncated_array_is_refused_by_name(name: str) -> None:
    fields = msgpack.unpackb(encode(make_record()))
    fields[name] = fields[name][:-1]
    with pytest.raises(RecordError, match=name):
        decode(msgpack.packb(fields))


def test_arrays_that_disagree_are_refused_at_encoding() -> None:
    record = make_record(length=4)
    bad = dataclasses.replace(record, accepted=record.accepted[:2])
    with pytest.raises(RecordError, match="accepted"):
        encode(bad)


@pytest.mark.parametrize("name", ["target_top_logprobs", "target_tail_mass", "processed_top_probs"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 7.0])
def test_numbers_that_are_no_probabilities_are_refused_by_name(name: str, value: float) -> None:
    record = make_record(temperature=0.8)
    array = getattr(record, name).copy()
    array.flat[-1] = value
    data = encode(dataclasses.replace(record, **{name: array}))
    with pytest.raises(RecordValueError, match=name):
        decode(data)


@pytest.mark.parametrize("name", ["temperature", "top_p", "created"])
def test_scalars_that_are_not_finite_are_refused_by_name(name: str) -> None:
    with pytest.raises(RecordValueError, match=name):
        decode(encode(dataclasses.replace(make_record(), **{name: float("nan")})))


def test_a_token_of_no_mass_and_a_broken_draft_are_no_reason_to_refuse() -> None:
    record = make_record()
    logprobs = record.target_top_logprobs.copy()
    logprobs[:, -1] = -np.inf
    nothing = np.full_like(record.draft_logprobs, np.nan)
    changed = dataclasses.replace(record, target_top_logprobs=logprobs, draft_logprobs=nothing)
    assert_same(changed, decode(encode(changed)))


def test_held_out_share_and_stability() -> None:
    prompts = [[n, n + 1, 7 * n] for n in range(4000)]
    share = np.mean([is_held_out(p, 0.15) for p in prompts])
    assert 0.12 < share < 0.18
    assert not any(is_held_out(p, 0.0) for p in prompts)
    assert all(is_held_out(p, 1.0) for p in prompts)


def test_held_out_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    code = (
        "from paceline.actors.replay.record import is_held_out;"
        "print([is_held_out([n], 0.5) for n in range(64)])"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert answers == {f"{[is_held_out([n], 0.5) for n in range(64)]}\n"}
