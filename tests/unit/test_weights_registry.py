"""The weight registry and its files, without Ray: the object store is a list."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.actors.weights.fingerprint import fingerprint
from paceline.actors.weights.flat import FlatWeights, flatten, unflatten
from paceline.actors.weights.registry import WeightRegistry

TOPICS = ("sql", "shell", "general")


def weights(value: float) -> FlatWeights:
    return flatten({"w": torch.full((4,), value, dtype=torch.bfloat16)})


def registry(directory: Path, *, mark: str = "aa", keep: int = 3) -> WeightRegistry:
    return WeightRegistry(
        str(directory), TOPICS, {}, mark, keep_versions=keep, put=lambda x: x, clock=lambda: 7.0
    )


def served(reg: WeightRegistry, topic: str) -> tuple[int, float]:
    version, [flat] = asyncio.run(reg.wait_newer({}, 0.01))[topic]
    return version, float(unflatten(flat)["w"][0])


def test_starts_with_version_zero_which_is_never_sent(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    assert reg.current() == {"sql": 0, "shell": 0, "general": 0}
    assert asyncio.run(reg.wait_newer({}, 0.01)) == {}


def test_published_weights_reach_those_who_have_older_ones(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    assert reg.publish("sql", weights(1.0), {"records": 9}) == 1
    assert served(reg, "sql") == (1, 1.0)
    assert asyncio.run(reg.wait_newer({"sql": 1}, 0.01)) == {}
    assert reg.publish("sql", weights(2.0), {}) == 2
    assert asyncio.run(reg.wait_newer({"sql": 1}, 0.01))["sql"][0] == 2


def test_a_waiting_poll_is_answered_by_the_publication(tmp_path: Path) -> None:
    reg = registry(tmp_path)

    async def scenario() -> dict[str, Any]:
        poll = asyncio.create_task(reg.wait_newer({"shell": 0}, 5.0))
        await asyncio.sleep(0.01)
        reg.publish("shell", weights(3.0), {})
        return await asyncio.wait_for(poll, 1.0)

    assert set(asyncio.run(scenario())) == {"shell"}


def test_an_unknown_topic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        registry(tmp_path).publish("poems", weights(1.0), {})


def test_a_restart_comes_back_with_the_last_version_and_the_history(tmp_path: Path) -> None:
    first = registry(tmp_path)
    first.publish("sql", weights(1.0), {"candidate_expected_acceptance": 0.5})
    first.publish("sql", weights(2.0), {})
    first.reject("shell", {"candidate_expected_acceptance": 0.1})
    second = registry(tmp_path)
    assert second.current() == {"sql": 2, "shell": 0, "general": 0}
    assert served(second, "sql") == (2, 2.0)
    assert second.history() == first.history()
    assert [d["outcome"] for d in second.history("sql")] == ["published", "published"]
    assert second.history("shell")[0] == {
        "time": 7.0,
        "topic": "shell",
        "outcome": "rejected",
        "version": 0,
        "parent": 0,
        "candidate_expected_acceptance": 0.1,
    }
    assert second.publish("sql", weights(3.0), {}) == 3


def test_versions_for_other_models_are_set_aside(tmp_path: Path) -> None:
    registry(tmp_path, mark="aa").publish("sql", weights(1.0), {})
    assert registry(tmp_path, mark="bb").current()["sql"] == 0
    assert registry(tmp_path, mark="aa").current()["sql"] == 1


def test_only_the_last_versions_are_kept(tmp_path: Path) -> None:
    reg = registry(tmp_path, keep=2)
    for value in range(5):
        reg.publish("sql", weights(float(value)), {})
    files = {path.name for path in (tmp_path / "aa" / "sql").iterdir()}
    assert files == {"4.safetensors", "5.safetensors", "manifest.json"}


def test_a_broken_newest_file_falls_back_under_a_higher_number(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    reg.publish("sql", weights(1.0), {})
    reg.publish("sql", weights(2.0), {})
    (tmp_path / "aa" / "sql" / "2.safetensors").write_bytes(b"torn")
    again = registry(tmp_path)
    assert served(again, "sql") == (3, 1.0)
    assert again.history()[-1]["outcome"] == "restored"


def test_versions_do_not_fall_when_all_files_are_gone(tmp_path: Path) -> None:
    registry(tmp_path).publish("sql", weights(1.0), {})
    (tmp_path / "aa" / "sql" / "1.safetensors").unlink()
    again = registry(tmp_path)
    assert again.current()["sql"] == 1
    assert again.publish("sql", weights(2.0), {}) == 2


def test_a_kill_between_weights_and_manifest_loses_nothing(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    reg.publish("sql", weights(1.0), {})
    folder = tmp_path / "aa" / "sql"
    (folder / "manifest.json").unlink()
    (folder / ".2.safetensors.77.partial").write_bytes(b"half")
    again = registry(tmp_path)
    assert served(again, "sql") == (1, 1.0)
    assert not list(folder.glob(".*"))


def test_a_line_cut_short_does_not_spoil_the_history(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    reg.reject("sql", {})
    with (tmp_path / "aa" / "history.jsonl").open("a") as file:
        file.write('{"topic": "sq')
    again = registry(tmp_path)
    again.reject("shell", {})
    assert [d["topic"] for d in registry(tmp_path).history()] == ["sql", "shell"]


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    for name, text in (("config.json", "{}"), ("model.safetensors", "weights")):
        (tmp_path / name).write_text(text)
    before = fingerprint([tmp_path])
    assert before == fingerprint([tmp_path])
    (tmp_path / "README.md").write_text("not part of it")
    assert before == fingerprint([tmp_path])
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1}))
    assert before != fingerprint([tmp_path])
