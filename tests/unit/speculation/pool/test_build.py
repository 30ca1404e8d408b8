"""Experts built from settings: KV cache for all targets, spare cores."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny

from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pool import build
from paceline.actors.speculation.pool.build import build_server, expert_kv_positions, spare_cores
from paceline.actors.speculation.pool.settings import ExpertSettings
from paceline.deploy.config.config import load_config
from paceline.deploy.config.replica_settings import expert_settings

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def settings(tmp_path: Path) -> ExpertSettings:
    """Two targets of three requests each; 1 KiB a position of the target, contexts of 128."""
    target = save_tiny(tmp_path / "t", 1, hidden=128)
    draft = save_tiny(tmp_path / "d", 2, layers=1)
    own = TargetSettings(
        str(target), {"sql": str(draft), "general": str(draft)}, dtype="float32", max_num_seqs=3
    )
    return ExpertSettings("sql", own, max_sequences=6)


def with_target(settings: ExpertSettings, **fields: Any) -> ExpertSettings:
    return dataclasses.replace(settings, target=dataclasses.replace(settings.target, **fields))


def test_an_experts_cache_is_as_large_as_all_targets_together(settings: ExpertSettings) -> None:
    assert expert_kv_positions(settings, torch.float32, CPU, 128) == 6 * 128
    small = with_target(settings, kv_cache_mb=1, max_num_seqs=64)
    small = dataclasses.replace(small, max_sequences=128, num_threads=2)
    each = 2**20 // 1024 - 32  # two blocks are for padding
    assert expert_kv_positions(small, torch.float32, CPU, 128) == 2 * each
    torch.set_num_threads(1)
    server = build_server(small)
    try:
        assert torch.get_num_threads() == 2
        runner = server._drafter._stack.runner
        assert runner.kv.allocator.num_available == 2 * each // 16
        assert server._drafter._stack._prefill_chunk == 64
    finally:
        server.close()


def test_on_a_gpu_the_cache_takes_a_share_of_the_free_memory(
    settings: ExpertSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft takes 512 bytes less per position than the target: its own count is what fits."""
    each = 2 * 2 * 8 * 4  # keys and values, two heads of 8, float32
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (each * 1000, 10**12))
    monkeypatch.setattr(build, "kv_block_size", lambda *_: 16)
    found = expert_kv_positions(settings, torch.float32, GPU, 128)
    assert 16 * (600 // 16 - 2) == found < 600
    whole = 4 * (each * 1000 + 2**30)  # for CUDA itself
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (whole, whole))
    own = dataclasses.replace(settings, gpu_share=0.25)  # other experts start beside it
    assert expert_kv_positions(own, torch.float32, GPU, 128) == found
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 10**12))
    assert expert_kv_positions(settings, torch.float32, GPU, 128) == 6 * 128


def test_a_spare_core_counts_for_one_expert_only(
    settings: ExpertSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "available_cores", lambda: 6)
    assert spare_cores(settings, CPU) == 2
    assert spare_cores(dataclasses.replace(settings, other_cores=4), CPU) == -2
    assert spare_cores(dataclasses.replace(settings, other_cores=4), GPU) >= settings.num_threads


def test_experts_count_the_cores_of_all_others(settings: ExpertSettings) -> None:
    overrides = {"drafts.placement": "pool", "drafts.num_replicas": 2, "drafts.num_threads": 3}
    config = load_config(None, overrides)
    own = expert_settings(config, settings.target, "sql")
    assert own.other_cores == 3 * (2 * len(config.drafts.experts) - 1)
