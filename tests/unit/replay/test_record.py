"""The replay record and its wire format."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import msgpack
import numpy as np
import pytest
from replay_samples import make_record, with_branches

from paceline.actors.replay.record import (
    SCHEMA_VERSION,
    RecordError,
    RecordValueError,
    ReplayRecord,
    decode,
    encode,
    is_held_out,
    prompt_digest,
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
    with pytest.raises(RecordError, match="schema 4"):
        decode(msgpack.packb(fields))


def branched() -> ReplayRecord:
    return with_branches(make_record(length=6), [(1, (7, 8, 9)), (4, (5,))])


def test_branches_round_trip() -> None:
    record = decode(encode(branched()))
    assert_same(branched(), record)
    assert list(record.branches()) == [(1, slice(0, 3)), (4, slice(3, 4))]
    assert list(make_record().branches()) == []


def test_the_first_schema_is_still_read() -> None:
    """What a shard wrote to disk before records knew of branches."""
    fields = msgpack.unpackb(encode(make_record()))
    old = fields | {"schema": 1, "processed_top_probs": None}
    assert not any(name.startswith("branch_") for name in old)
    assert_same(make_record(), decode(msgpack.packb(old)))


def test_a_record_without_branches_is_no_larger_for_them() -> None:
    assert len(encode(make_record())) < len(encode(branched())) - 4 * (4 + 4 + 4 * 6 + 4)
    assert b"branch" not in encode(make_record())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("branch_positions", [4, 1]),
        ("branch_positions", [1, 6]),
        ("branch_positions", [-1, 4]),
        ("branch_positions", [1]),
        ("branch_lengths", [3, 2]),
        ("branch_lengths", [4, 0]),
        ("branch_token_ids", [7, 8, 9]),
        ("branch_tail_mass", [0.1]),
    ],
)
def test_branches_that_make_no_sense_are_refused(name: str, value: list[float]) -> None:
    changed = np.array(value, dtype=getattr(branched(), name).dtype)
    with pytest.raises(RecordError, match="branch_"):
        encode(dataclasses.replace(branched(), **{name: changed}))
    fields = msgpack.unpackb(encode(branched())) | {name: changed.tobytes()}
    with pytest.raises(RecordError, match="branch_"):
        decode(msgpack.packb(fields))


def test_half_of_the_branches_is_refused() -> None:
    fields = msgpack.unpackb(encode(branched()))
    del fields["branch_top_ids"]
    with pytest.raises(RecordError, match="all together"):
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


@pytest.mark.parametrize("name", ["branch_top_logprobs", "branch_tail_mass"])
def test_branches_of_no_probabilities_are_refused_by_name(name: str) -> None:
    array = getattr(branched(), name).copy()
    array.flat[0] = np.nan
    data = encode(dataclasses.replace(branched(), **{name: array}))
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
    prompts = [prompt_digest([n, n + 1, 7 * n]) for n in range(4000)]
    share = np.mean([is_held_out(p, 0.15) for p in prompts])
    assert 0.12 < share < 0.18
    assert not any(is_held_out(p, 0.0) for p in prompts)
    assert all(is_held_out(p, 1.0) for p in prompts)


def test_held_out_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    code = (
        "from paceline.actors.replay.record import prompt_digest;"
        "print([prompt_digest([n]) for n in range(64)])"
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
    assert answers == {f"{[prompt_digest([n]) for n in range(64)]}\n"}


def test_a_record_keeps_the_first_prompt_of_its_conversation() -> None:
    first, later = make_record(), make_record(prompt=(1, 2, 3, 4, 5))
    assert decode(encode(first)).conversation == prompt_digest((1, 2, 3))
    later = dataclasses.replace(later, first_prompt=first.conversation)
    assert decode(encode(later)).conversation == first.conversation
    broken = msgpack.unpackb(encode(later)) | {"first_prompt": "x"}
    with pytest.raises(RecordError, match="first_prompt"):
        decode(msgpack.packb(broken))
