"""Cores are those that a process may use, not the machine's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.actors import cores
from paceline.actors.cores import available_cores, default_threads, quota_cores
from paceline.actors.engine.settings import TargetSettings
from paceline.deploy.config.config import load_config
from paceline.deploy.config.replica_settings import target_settings


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("max 100000\n", None),
        ("-1\n 100000\n", None),
        ("200000 100000\n", 2),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
    ],
)
def test_a_quota_is_whole_cores(text: str, found: int | None) -> None:
    assert quota_cores(text) == found


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu.max": "300000 100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": "\n"}, 8),
    ],
)
def test_affinity_and_quota_bound_the_cores(
    files: dict[str, str], found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cores, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert available_cores() == found


def test_half_of_the_cores_but_two_are_the_targets() -> None:
    assert [default_threads(n) for n in (1, 2, 3, 4, 16)] == [1, 2, 2, 2, 8]


def test_threads_are_chosen_where_the_target_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    settings = target_settings(load_config(None, {}))  # on the head
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert settings.threads == 2
    assert TargetSettings("t", num_threads=5).threads == 5
