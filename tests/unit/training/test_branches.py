"""Positions behind rejected tokens: from the engine's rounds to the logits that learn from them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from engines import make_engine, request, run
from replay_samples import make_record, with_branches
from tiny_models import tiny_llama

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.recorder import Recorder, target_top_k
from paceline.actors.replay.record import ReplayRecord, decode, encode
from paceline.actors.training.batches import make_batch, usable
from paceline.actors.training.forward import logits_at, takes_branches

PROMPT = (1, 3, 40, 41, 42, 4)


def recording(engine: Engine) -> Engine:
    """The engine, which records branches from now on."""
    engine._settings = dataclasses.replace(engine._settings, replay_branches=True)
    engine._record_buffer = engine._make_record_buffer()
    return engine


def record_of(engine: Engine, **fields: object) -> ReplayRecord:
    record = run(engine, [request("r", PROMPT, **fields)])["r"][-1].record
    assert record is not None
    return decode(encode(record))


target = functools.cache(tiny_llama)


@torch.inference_mode()
def target_law(tokens: list[int], seed: int = 1) -> torch.Tensor:
    """log p of what follows these tokens, by the stock model."""
    logits = target(seed)(input_ids=torch.tensor([tokens])).logits[0, -1]
    law: torch.Tensor = logits.float().log_softmax(-1)
    return law


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_branches_say_what_the_target_says_behind_each_rejected_token(temperature: float) -> None:
    record = record_of(recording(make_engine()), temperature=temperature)
    assert record.branch_token_ids is not None
    assert record.branch_top_ids is not None
    assert record.branch_top_logprobs is not None
    assert record.branch_tail_mass is not None
    branches = list(record.branches())
    assert [at for at, _ in branches] == np.flatnonzero(record.accepted == 0).tolist()
    assert max(rows.stop - rows.start for _, rows in branches) > 1
    for at, rows in branches:
        tokens = record.branch_token_ids[rows].tolist()
        assert tokens[0] == record.draft_token_ids[at] != record.output_token_ids[at]
        for j in range(len(tokens)):
            text = [*PROMPT, *record.output_token_ids[:at].tolist(), *tokens[: j + 1]]
            law, row = target_law(text), rows.start + j
            ids = torch.tensor(record.branch_top_ids[row], dtype=torch.int64)
            found = torch.tensor(record.branch_top_logprobs[row]).float()
            torch.testing.assert_close(found, law[ids], atol=2e-2, rtol=1e-2)
            assert int(ids[0]) == int(law.argmax())
            rest = 1.0 - float(law[ids].exp().sum())
            assert float(record.branch_tail_mass[row]) == pytest.approx(rest, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_recording_branches_changes_nothing_else(temperature: float) -> None:
    plain = record_of(make_engine(), temperature=temperature)
    more = record_of(recording(make_engine()), temperature=temperature)
    assert plain.branch_positions is None
    for field in dataclasses.fields(ReplayRecord):
        if not field.name.startswith("branch_"):
            np.testing.assert_array_equal(getattr(plain, field.name), getattr(more, field.name))


@pytest.mark.parametrize(("count", "branches"), [(1, []), (2, [1]), (4, [1]), (5, [1, 4])])
def test_an_answer_that_ends_early_has_no_branch_beyond_its_end(
    count: int, branches: list[int]
) -> None:
    recorder, rounds = Recorder(), [([5, 6, 7], 1), ([8], 1), ([9, 3], 0)]
    for drafts, accepted in rounds:
        log = target_top_k([torch.randn(len(drafts) + 1, 50)], [], 4)
        end = len(drafts) + 1
        at, behind = slice(0, accepted + 1), slice(accepted + 1, end)
        recorder.add(log, at, drafts, [0.5] * len(drafts), accepted, behind)
    record = recorder.finish(request("r", PROMPT), list(range(count)), 0, 0.0)
    assert [at for at, _ in decode(encode(record)).branches()] == branches


def test_plain_decoding_and_a_draft_equal_to_the_target_record_no_branches() -> None:
    assert record_of(recording(make_engine()), draft="off").branch_positions is None
    twin = make_engine(draft_seed=1)
    assert record_of(recording(twin), num_speculative_tokens=0).branch_positions is None


def branched(prompt: tuple[int, ...] = (5, 6, 7)) -> ReplayRecord:
    record = make_record(prompt=prompt, length=8, seed=3)
    return with_branches(record, [(0, (11, 12)), (3, (13,)), (6, (14, 15, 16))])


def test_a_branch_is_learnt_in_the_very_context_that_the_draft_was_in() -> None:
    """Logits of the packed row equal those of a row per branch, by the stock model."""
    draft = tiny_llama(9, layers=2)
    draft.set_attn_implementation("eager")
    records = [branched(), make_record(length=5, seed=4), branched((9, 8, 7, 6, 5))]
    batch = make_batch(records, max_length=64, branches=True)
    assert batch.num_records == 3
    assert int(batch.branch.sum()) == 12
    with torch.inference_mode():
        logits = logits_at(draft, batch)
        at = 0
        for record in records:
            prompt, output = record.prompt_token_ids.tolist(), record.output_token_ids.tolist()
            contexts = [[*prompt, *output[:n]] for n in range(len(output))]
            for position, rows in record.branches():
                assert record.branch_token_ids is not None
                tokens = record.branch_token_ids[rows].tolist()
                text = [*prompt, *output[:position]]
                contexts += [[*text, *tokens[: j + 1]] for j in range(len(tokens))]
            for context in contexts:
                alone = draft(input_ids=torch.tensor([context])).logits[0, -1]
                torch.testing.assert_close(logits[at], alone, atol=1e-4, rtol=1e-4)
                at += 1
    assert at == batch.num_positions


def test_labels_of_branches_stand_with_their_tokens() -> None:
    record = branched()
    assert record.branch_top_ids is not None
    batch = make_batch([record], max_length=64, branches=True)
    behind = batch.branch
    assert batch.top_ids[behind].tolist() == record.branch_top_ids.tolist()
    assert batch.output_ids[behind].tolist() == record.branch_top_ids[:, 0].tolist()
    tokens = batch.input_ids[batch.rows[behind], batch.columns[behind]]
    assert tokens.tolist() == [11, 12, 13, 14, 15, 16]
    assert (batch.accepted[behind] == -1).all()
    assert batch.accepted[~behind].tolist() == record.accepted.tolist()


def test_without_branches_a_batch_is_what_it_was() -> None:
    record = make_record(prompt=(5, 6, 7), length=8, seed=3)
    plain = make_batch([record], max_length=64)
    for batch in (
        make_batch([branched()], max_length=64),
        make_batch([record], max_length=64, branches=True),
    ):
        assert batch.mask is None
        assert batch.position_ids is None
        assert torch.equal(batch.input_ids, plain.input_ids)
        assert torch.equal(batch.columns, plain.columns)
        assert batch.num_positions == 8


def test_branches_of_what_was_cut_off_are_left_out() -> None:
    batch = make_batch([branched(tuple(range(1, 21)))], max_length=10, branches=True)
    # 10 tokens go in: 6 of the prompt, 4 of the answer, which predict 5; the third branch is gone
    assert batch.input_ids[batch.rows[batch.branch], batch.columns[batch.branch]].tolist() == [
        11,
        12,
        13,
    ]
    assert batch.position_ids is not None
    assert int(batch.position_ids.max()) < 10


def test_a_branch_of_unknown_tokens_is_not_usable() -> None:
    assert usable(branched(), 300)
    assert not usable(with_branches(make_record(), [(1, (300,))]), 300)


def test_a_draft_that_mixes_tokens_otherwise_is_recognised() -> None:
    draft = tiny_llama(9, layers=2)
    draft.set_attn_implementation("eager")
    assert takes_branches(draft.train())
    assert draft.training
    assert takes_branches(tiny_llama(9, layers=1).bfloat16())
    whole = draft.forward

    def unmasked(**given: Any) -> Any:
        return whole(**(given | {"attention_mask": None}))

    draft.forward = unmasked
    assert not takes_branches(draft)
    draft.forward = lambda input_ids, use_cache: whole(input_ids=input_ids, use_cache=use_cache)
    assert not takes_branches(draft)
    draft.forward = whole
    draft.config.sliding_window = 4
    assert not takes_branches(draft)
