"""Engines built from model folders and settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from engines import request, run, tokens_of
from tiny_models import save_tiny, tiny_llama
from transformers import AutoConfig

from paceline.actors.engine.build import (
    DraftMemory,
    build_engine,
    build_stacks,
    draft_memory,
    free_memory,
    kv_positions,
)
from paceline.actors.engine.kv_cache import position_bytes
from paceline.actors.engine.model_runner import kv_shapes
from paceline.actors.engine.native.kernels import kernels_for
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.weights.eagle import VOCABULARY, new_draft, read_draft, save_draft


@pytest.mark.parametrize("max_model_len", [4, 8, 12, None])
def test_a_short_context_is_served_with_k_left_to_the_engine(
    tmp_path: Path, max_model_len: int | None
) -> None:
    target, draft = save_tiny(tmp_path / "t", 1), save_tiny(tmp_path / "d", 2, layers=1)
    settings = TargetSettings(
        str(target),
        {"general": str(draft), "sql": str(draft)},
        dtype="float32",
        num_threads=1,
        max_num_seqs=3,
        max_model_len=max_model_len,
        max_speculative_tokens=32,
    )
    engine, _, facts = build_engine(settings)
    assert facts.max_model_len == (max_model_len or 128)
    asked = [
        request(f"r{i}", [5, 6], draft=draft, max_tokens=99, ignore_eos=True)
        for i, draft in enumerate(("sql", "general", "sql@0", "general@0", "off"))
    ]
    answers = [tokens_of(o) for o in run(engine, asked).values()]
    assert {len(a) for a in answers} == {(max_model_len or 101) - 2}
    assert all(a == answers[0] for a in answers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_as_large_as_asked_and_never_too_small_for_one(
    tmp_path: Path, dtype: str
) -> None:
    """Two layers of two heads of 64: 1 or 2 KiB a position, with blocks of 16."""
    target = save_tiny(tmp_path / "t", 1, hidden=256)
    draft = save_tiny(tmp_path / "d", 2, layers=1)
    each = 2 * 2 * 2 * 64 * (4 if dtype == "float32" else 2)

    def settings(**own: int | None) -> TargetSettings:
        return TargetSettings(
            str(target), {"general": str(draft)}, dtype=dtype, num_threads=1, max_num_seqs=3, **own
        )

    engine, _, facts = build_engine(settings())
    assert facts.kv_block_size == 16
    assert engine.kv_blocks == (3 * 8, 3 * 8)  # three contexts of 128
    engine, _, _ = build_engine(settings(kv_cache_mb=1))
    kv = engine._runner.kv  # type: ignore[attr-defined]
    assert engine.kv_blocks == (2**20 // (16 * each) - 2,) * 2
    own = [tensor.nbytes for tensor in (*kv.keys, *kv.values)]
    assert 2**20 - 16 * each < sum(own) <= 2**20
    assert {tensor.dtype for tensor in kv.keys} == {getattr(torch, dtype)}
    asked = [request(f"r{i}", [5 + i], draft="general", max_tokens=99) for i in range(4)]
    assert len(run(engine, asked)) == 4


def test_memory_for_less_than_one_request_names_the_setting(tmp_path: Path) -> None:
    """8 KiB a position: 18 blocks of 128 KiB, two of them for padding."""
    target = save_tiny(tmp_path / "t", 1, hidden=1024, max_position_embeddings=256)
    settings = TargetSettings(str(target), dtype="float32", num_threads=1, kv_cache_mb=2)
    with pytest.raises(ValueError, match=r"target.kv_cache_mb: there is room for 224 .* least 3, "):
        build_engine(settings)


def test_batch_variance_is_reported_and_refused_if_invariance_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = save_tiny(tmp_path / "t", 1), save_tiny(tmp_path / "d", 2, layers=1)
    settings = TargetSettings(
        str(target),
        {"general": str(draft)},
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_num_seqs=3,
        numerics="invariant",
    )
    if kernels_for(torch.device("cpu"), torch.float32) is None:
        pytest.skip("no compiler made the kernels")
    assert build_engine(settings)[2].numerics == "invariant"
    monkeypatch.setattr("paceline.actors.engine.build.batch_invariant", lambda _: False)
    auto = dataclasses.replace(settings, numerics="auto")
    assert build_engine(auto)[2].numerics == "varying"
    with pytest.raises(ValueError, match=r"target\.numerics.*float32"):
        build_engine(settings)


def test_the_default_kv_cache_fits_the_free_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:      64 kB\n")
    assert free_memory(meminfo, tmp_path) == 64 * 1024
    (tmp_path / "memory.max").write_text("40000\n")
    (tmp_path / "memory.current").write_text("30000\n")
    assert free_memory(meminfo, tmp_path) == 10000
    (tmp_path / "memory.stat").write_text("anon 9000\nfile 21000\ninactive_file 20000\n")
    assert free_memory(meminfo, tmp_path) == 30000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(meminfo, tmp_path) == 64 * 1024
    assert free_memory(tmp_path / "none", tmp_path) > 2**20


@pytest.mark.parametrize("canary", [0.0, 0.1])
def test_the_memory_of_eagle_drafts_has_the_rows_of_the_head_that_each_may_need(
    tmp_path: Path, canary: float
) -> None:
    target = save_tiny(tmp_path / "t", 1)
    save_draft(new_draft(target, vocabulary=torch.arange(50, dtype=torch.int32)), tmp_path / "d")
    folder = str(tmp_path / "d")
    drafts = {"general": folder, "sql": folder}
    settings = TargetSettings(
        str(target), drafts, dtype="float32", num_threads=1, max_num_seqs=1, canary_share=canary
    )
    engine, _, _ = build_engine(settings)
    stack = engine.draft_runner._proposer._stacks["sql"]  # type: ignore[attr-defined]
    slots = [name for name in stack.names if "@0" not in name]
    for i, name in enumerate(slots):  # of vocabularies that all differ
        state = read_draft(folder).state_dict()
        state[VOCABULARY] = state[VOCABULARY] + i + 1
        engine.updates.put(SwapWeights(name, 1, state))
    run(engine, [request("r", [5, 6], draft="sql")])
    heads = [head.linear.weight for head in stack.runner.decoder._heads.values()]
    assert len(heads) == len(stack.names) == (3 if canary == 0.0 else 5)
    own = [tensor for model in stack.runner.models for tensor in model.state_dict().values()]
    weights = sum(tensor.nbytes for tensor in (*own, *heads))
    assert draft_memory(settings, torch.float32).weights == weights


@pytest.mark.parametrize("canary", [0.0, 0.1])
def test_on_a_gpu_the_kv_cache_reserves_memory_for_the_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, canary: float
) -> None:
    """All that is loaded after the target's keys and values has to fit beside them."""
    target, draft = save_tiny(tmp_path / "t", 1), save_tiny(tmp_path / "d", 2, layers=1)
    settings = TargetSettings(
        str(target),
        {"general": str(draft), "sql": str(draft)},
        num_threads=1,
        max_num_seqs=1000,
        canary_share=canary,
    )
    stacks = build_stacks(settings, torch.float32, torch.device("cpu"), 128, 128)
    models = [model for stack in stacks for model in stack.runner.models]
    weights = sum(weight.nbytes for model in models for weight in model.parameters())
    assert draft_memory(settings, torch.float32).weights == weights
    config = AutoConfig.from_pretrained(target)
    each = position_bytes(kv_shapes(config), torch.float32)
    own = position_bytes(kv_shapes(AutoConfig.from_pretrained(draft)), torch.float32)
    free = weights + 2_000 * (each + own)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 10**12))
    monkeypatch.setattr("paceline.actors.engine.build.kv_block_size", lambda *_: 16)
    gpu = torch.device("cuda")
    found = kv_positions(settings, config, torch.float32, gpu, 128)
    assert found == 16 * (1_600 // 16 - 2)
    pool = dataclasses.replace(settings, placement="pool")
    assert draft_memory(pool, torch.float32) == DraftMemory()
    alone = kv_positions(pool, config, torch.float32, gpu, 128)
    assert alone == 16 * (int(0.8 * free) // (16 * each) - 2) > found
    whole = 4 * (2 * free + 2**30)  # for CUDA itself
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (whole, whole))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: free)  # the target's weights
    shared = dataclasses.replace(settings, gpu_share=0.25)  # others that start take the rest
    assert kv_positions(shared, config, torch.float32, gpu, 128) == found
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (weights // 2, 10**12))
    with pytest.raises(ValueError, match="there is room for 0 positions"):
        kv_positions(settings, config, torch.float32, gpu, 128)


def test_little_memory_gives_fewer_blocks_but_enough_for_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = save_tiny(tmp_path / "t", 1), save_tiny(tmp_path / "d", 2, layers=1)
    settings = TargetSettings(
        str(target), {"general": str(draft)}, device="cpu", num_threads=1, max_num_seqs=9
    )
    whole, _ = build_engine(settings)[0].kv_blocks
    monkeypatch.setattr("paceline.actors.engine.build.free_memory", lambda: 0)
    one, _ = build_engine(settings)[0].kv_blocks
    assert whole == 9 * one > 0


def test_a_canary_gives_every_draft_a_second_slot(tmp_path: Path) -> None:
    """A second slot is weights alone: the key/value memory of drafts stays what it was."""
    target = save_tiny(tmp_path / "t", 1)
    drafts = {name: str(save_tiny(tmp_path / "d", 2, layers=1)) for name in ("general", "sql")}
    settings = TargetSettings(
        str(target), drafts, dtype="float32", num_threads=1, max_num_seqs=2,
        num_speculative_tokens=3,
    )  # fmt: skip
    sizes = []
    for share in (0.0, 0.5):
        own = dataclasses.replace(settings, canary_share=share)
        (stack,) = build_stacks(own, torch.float32, torch.device("cpu"), 128)
        sizes.append((len(stack.runner.models), sum(k.nbytes for k in stack.runner.kv.keys)))
        engine, _, _ = build_engine(own)
        engine.updates.put(SwapWeights("sql@candidate", 4, tiny_llama(9, layers=1).state_dict()))
        run(engine, [request("r", [5, 6], draft="sql")])
        assert ("sql@candidate" in engine.drafts()) == (share > 0)
    assert sizes == [(3, sizes[0][1]), (5, sizes[0][1])]
