"""A request with NaN or infinite logits fails alone and leaves nothing to others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import engine_of, request, run, served, tokens_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.actors.engine.decoders import ModuleDecoder
from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.engine.fused import FusedDecoder
from paceline.actors.engine.request import FINISH_NOT_FINITE
from paceline.actors.replay.record import decode, encode
from paceline.actors.speculation.rejection_sampler import non_finite_positions

POISON = 7  # the token whose embedding is infinite, as activations are that overflow
CLEAN = tuple(range(20, 44))  # longer than a block: a prefix of it is kept
BROKEN = (1, *CLEAN[:16], *[POISON] * 30)
NUMBERS = st.sampled_from([0.0, 1.5, -3e4, math.nan, math.inf, -math.inf])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def llama(dtype: torch.dtype, *, poisoned: bool = True, seed: int = 1, **more: Any) -> Any:
    model = tiny_llama(seed, **more)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    if poisoned:
        model.model.embed_tokens.weight.data[POISON] = torch.inf
    return served(model.to(dtype))


def gpt2(dtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=300,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config).eval()
    model.transformer.wte.weight.data[POISON] = torch.inf
    return served(model.to(dtype))


TARGETS = [
    pytest.param(
        make,
        dtype,
        id=f"{make.__name__}-{str(dtype).removeprefix('torch.')}",
        marks=pytest.mark.full if dtype is torch.float16 else (),
    )
    for make in (llama, gpt2)
    for dtype in DTYPES
]


def engine(target: Any, *, drafts: dict[str, Any] | None = None, **more: Any) -> Engine:
    own = {"a": llama(target.dtype, poisoned=False, seed=2, layers=1)} if drafts is None else drafts
    return engine_of(target, [own], max_num_seqs=3, **more)


def others(name: str, **fields: Any) -> list[Any]:
    """Two requests of other users, one of them drafting, with a prefix in common."""
    fields = {"max_tokens": 24, "ignore_eos": True, "logprobs": 1} | fields
    return [
        request(f"{name}-plain", (1, *CLEAN), draft="off", **fields),
        request(f"{name}-drafted", (1, *CLEAN, 50), draft="a", **fields),
    ]


def said(outputs: dict[str, list[StepOutput]], name: str) -> list[Any]:
    """Tokens and log-probabilities of both, to the last bit."""
    parts = [outputs[f"{name}-{kind}"] for kind in ("plain", "drafted")]
    return [
        (tokens_of(part), [entry for o in part for entry in o.chunk.logprobs or ()])
        for part in parts
    ]


def memory_is_finite(engine: Engine) -> bool:
    kv = engine._runner.kv
    return all(bool(part.isfinite().all()) for part in (*kv.keys, *kv.values))


@pytest.mark.parametrize(("make", "dtype"), TARGETS)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 0.8])
def test_it_fails_alone_and_later_requests_answer_as_ever(
    make: Any, dtype: torch.dtype, temperature: float
) -> None:
    fresh = engine(make(dtype))
    assert isinstance(fresh._runner.decoder, FusedDecoder if make is llama else ModuleDecoder)
    expected = said(run(fresh, others("x", temperature=temperature, seed=5)), "x")
    assert all(math.isfinite(entry.logprob) for _, entries in expected for entry in entries)
    serving = engine(make(dtype))
    broken = request("broken", BROKEN, draft="off", max_tokens=20)
    outputs = run(serving, [broken])["broken"]
    assert outputs[-1].chunk.finish_reason == FINISH_NOT_FINITE
    assert tokens_of(outputs) == []
    assert outputs[-1].record is None
    assert memory_is_finite(serving)
    for turn in range(3):
        name = f"later{turn}"
        later = run(serving, others(name, temperature=temperature, seed=5))
        assert said(later, name) == expected


@pytest.mark.parametrize(("make", "dtype"), TARGETS)
@pytest.mark.parametrize("kv_positions", [None, 160], ids=["roomy", "scarce"])
def test_beside_others_it_fails_alone(
    make: Any, dtype: torch.dtype, kv_positions: int | None
) -> None:
    """The same batches with a sound third request and with one that breaks: the same bits."""
    answers = []
    broken = BROKEN
    if dtype is torch.float16:
        # Bits vary with the batch there, and a prompt with a prefix of the others' changes that.
        broken = (1, *[POISON + 1] * 16, *[POISON] * 30)
    for prompt in ((1, *[POISON + 1] * 46), broken):
        serving = engine(make(dtype), kv_positions=kv_positions)
        third = request("third", prompt, draft="a", max_tokens=1)
        answers.append(outputs := run(serving, [third, *others("x")], draft_failures=True))
        assert outputs["third"][-1].chunk.finish_reason == (
            FINISH_NOT_FINITE if prompt is broken else "length"
        )
        assert memory_is_finite(serving)
    assert said(answers[0], "x") == said(answers[1], "x")


def test_what_is_not_finite_is_never_kept_as_a_prefix() -> None:
    """Also where the last position says nothing of it: a window has left it behind."""
    serving = engine(llama(torch.float32))
    run(serving, [request("broken", BROKEN, draft="off")])
    again = request("again", (*BROKEN[:17], 60), draft="off", max_tokens=4)
    outputs = run(serving, [again])["again"]
    assert outputs[-1].chunk.num_cached_tokens in (0, 16)
    assert outputs[-1].chunk.finish_reason == "length"
    kv = serving._runner.kv
    assert kv.allocate(0, 32)
    kv.keys[1][kv.blocks(0)[1], 3] = torch.nan
    kv.cache_prefix(0, list(range(100, 132)))
    kv.free(0)
    assert kv.allocate_with_prefix(0, list(range(100, 132)), 32) == 16
    kv.free(0)


def draft_of_one_token(dtype: torch.dtype) -> Any:
    """A draft that proposes the token that the target cannot compute, whatever comes before."""
    draft = llama(dtype, poisoned=False, seed=2, layers=1)
    draft.model.embed_tokens.weight.data.fill_(1)
    for part in (draft.model.layers[0].self_attn.o_proj, draft.model.layers[0].mlp.down_proj):
        part.weight.data.zero_()
    draft.lm_head.weight.data.zero_()
    draft.lm_head.weight.data[POISON] = 1
    return draft


@pytest.mark.parametrize(("make", "dtype"), TARGETS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_drafted_token_that_breaks_the_target_changes_no_answer(
    make: Any, dtype: torch.dtype, temperature: float
) -> None:
    fields = {"temperature": temperature, "seed": 3, "max_tokens": 24, "ignore_eos": True}
    plain = request("r", (1, *CLEAN), draft="off", **fields)
    expected = tokens_of(run(engine(make(dtype)), [plain])["r"])
    assert POISON not in expected
    serving = engine(make(dtype), drafts={"a": draft_of_one_token(dtype)})
    found = run(serving, [request("r", (1, *CLEAN), draft="a", **fields)])["r"]
    stats = found[-1].chunk.speculative
    assert stats is not None
    assert stats.num_draft_tokens or stats.draft == "off"  # off: computed again without drafts
    assert tokens_of(found) == expected
    assert found[-1].chunk.finish_reason == "length"


def test_a_drafted_token_that_breaks_the_target_spoils_no_record() -> None:
    """Nor the other branches, behind tokens that were drafted and rejected."""
    dtype = torch.float32
    asked = request("r", (1, *CLEAN), max_tokens=24, ignore_eos=True)
    branches = []
    for draft in (draft_of_one_token(dtype), llama(dtype, poisoned=False, seed=2, layers=1)):
        serving = engine(llama(dtype), drafts={"a": draft})
        serving._settings = replace(serving._settings, replay_branches=True)
        serving._record_buffer = serving._make_record_buffer()
        record = run(serving, [asked])["r"][-1].record
        assert record is not None
        branches.append(decode(encode(record)).branch_positions)  # it can be read
    assert branches[0] is None
    assert branches[1] is not None


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_answer_may_end_with_a_token_that_the_target_cannot_read(
    at: int, temperature: float
) -> None:
    """A perfect draft proposes the last token, and more behind it."""
    same = llama(torch.float32, poisoned=False)
    fields = {"temperature": temperature, "seed": 3, "max_tokens": 24, "ignore_eos": True}
    free = request("r", (1, *CLEAN), draft="off", **fields)
    answer = tokens_of(run(engine(same, drafts={"a": same}), [free])["r"])
    assert answer[at] not in (1, *CLEAN, *answer[:at])
    target = llama(torch.float32, poisoned=False)
    target.model.embed_tokens.weight.data[answer[at]] = torch.inf
    for draft in ("off", "a"):
        asked = request("r", (1, *CLEAN), draft=draft, stop_token_ids=(answer[at],), **fields)
        outputs = run(engine(target, drafts={"a": same}), [asked])["r"]
        assert tokens_of(outputs) == answer[: at + 1]
        assert outputs[-1].chunk.finish_reason == "stop"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_that_breaks_a_draft_changes_no_answer_and_no_other_draft(
    dtype: torch.dtype,
) -> None:
    """The drafts share their memory: what is left in it must not reach the later requests."""
    target = llama(dtype, poisoned=False)
    drafts = {
        "a": llama(dtype, seed=2, layers=1),
        "b": llama(dtype, poisoned=False, seed=1, layers=1),
    }
    sound = request("sound", (1, *CLEAN), draft="b", max_tokens=24, ignore_eos=True)
    prompt = request("broken", BROKEN, draft="a", max_tokens=8, ignore_eos=True)
    expected = run(engine(target, drafts=drafts), [sound])["sound"]
    plain = request("plain", BROKEN, draft="off", max_tokens=8, ignore_eos=True)
    answer = tokens_of(run(engine(target), [plain])["plain"])
    serving = engine(target, drafts=drafts)
    for name in ("first", "second"):
        broken = replace(prompt, request_id=f"{name}-broken")
        beside = replace(sound, request_id=f"{name}-sound")
        outputs = run(serving, [broken, beside], draft_failures=True)
        assert tokens_of(outputs[broken.request_id]) == answer
        found = outputs[beside.request_id]
        assert tokens_of(found) == tokens_of(expected)
        assert found[-1].chunk.speculative == expected[-1].chunk.speculative
    assert serving.draft_failures


@given(
    st.lists(
        st.lists(
            st.lists(NUMBERS, min_size=3, max_size=3),
            min_size=2,
            max_size=2,
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 1), min_size=3, max_size=3),
)
def test_a_position_is_broken_if_it_gives_no_distribution(
    rows: list[list[list[float]]], dtype: torch.dtype, drafted: list[int]
) -> None:
    logits = torch.tensor(rows).to(dtype)
    expected = [[not math.isfinite(float(t.float().logsumexp(0))) for t in row] for row in logits]
    found = non_finite_positions(logits, drafted[: len(rows)]) or [[False] * 2 for _ in rows]
    for flags, own, count in zip(found, expected, drafted, strict=False):
        assert flags[: count + 1] == own[: count + 1]
