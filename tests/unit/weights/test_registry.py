"""The weight registry and its files, without Ray: the object store is a list."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny

from paceline.actors.weights import state_folder as lock
from paceline.actors.weights.cooldown import CandidateRefusedError
from paceline.actors.weights.flat_weights import (
    FlatWeights,
    flatten,
    load_model,
    unflatten,
)
from paceline.actors.weights.history import append_decision, read_all_decisions
from paceline.actors.weights.notifications import SlotWeights
from paceline.actors.weights.registry import WeightRegistry
from paceline.actors.weights.state_folder import StateFolderLockedError, fingerprint, fingerprints
from paceline.actors.weights.topic_store import WeightFiles

TOPICS = ("sql", "shell", "general")


def weights(value: float) -> FlatWeights:
    return flatten({"w": torch.full((4,), value, dtype=torch.bfloat16)})


def registry(directory: Path, *, mark: str = "aa", keep: int = 3) -> WeightRegistry:
    return WeightRegistry(
        str(directory), TOPICS, mark, keep_versions=keep, put=lambda x: x, clock=lambda: 7.0
    )


def served(reg: WeightRegistry, topic: str) -> tuple[int, float]:
    found = changed(reg, {})[topic]
    return found.weight_version, float(unflatten(found.reference)["w"][0])


def changed(reg: WeightRegistry, known: dict[str, int]) -> Mapping[str, SlotWeights]:
    return asyncio.run(reg.wait_for_changes(known, None, 0.01)).weights


def test_starts_with_version_zero_which_is_never_sent(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    assert reg.stable_versions() == {"sql": 0, "shell": 0, "general": 0}
    assert changed(reg, {}) == {}


def test_published_weights_reach_subscribers_with_older_ones(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    assert reg.publish("sql", weights(1.0), {"records": 9}) == 1
    assert served(reg, "sql") == (1, 1.0)
    assert changed(reg, {"sql": 1}) == {}
    assert reg.publish("sql", weights(2.0), {}) == 2
    assert changed(reg, {"sql": 1})["sql"].weight_version == 2


def test_weights_that_go_on_from_a_withdrawn_version_are_not_published(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    assert reg.publish("sql", weights(1.0), {}, base=0) == 1
    assert reg.publish("sql", weights(2.0), {}, base=1) == 2
    reg.roll_back("sql")  # to the first, as version 3
    with pytest.raises(CandidateRefusedError, match="version 2 is neither stable nor on trial"):
        reg.publish("sql", weights(4.0), {}, base=2)
    assert served(reg, "sql") == (3, 1.0)
    assert reg.publish("sql", weights(4.0), {}, base=3) == 4


def test_a_waiting_poll_is_answered_by_the_publication(tmp_path: Path) -> None:
    reg = registry(tmp_path)

    async def scenario() -> Mapping[str, SlotWeights]:
        poll = asyncio.create_task(reg.wait_for_changes({"shell": 0}, None, 5.0))
        await asyncio.sleep(0.01)
        reg.publish("shell", weights(3.0), {})
        return (await asyncio.wait_for(poll, 1.0)).weights

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
    assert second.stable_versions() == {"sql": 2, "shell": 0, "general": 0}
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
    assert registry(tmp_path, mark="bb").stable_versions()["sql"] == 0
    assert registry(tmp_path, mark="aa").stable_versions()["sql"] == 1


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
    assert again.stable_versions()["sql"] == 1
    assert again.publish("sql", weights(2.0), {}) == 2


@pytest.mark.parametrize("cause", ["unlinked", "torn"])
def test_lost_weights_give_way_to_the_initial_ones_under_a_new_number(
    tmp_path: Path, cause: str
) -> None:
    """Else a draft that lives on and one that begins again would serve the same number."""
    folder, state = tmp_path / "draft", tmp_path / "state"
    initial_weights = load_model(save_tiny(folder, 1, layers=1, tokenizer=False))

    def start() -> WeightRegistry:
        initial = {"sql": str(folder), "shell": str(tmp_path / "nowhere")}
        return WeightRegistry(str(state), TOPICS, "aa", initial=initial, put=lambda x: x)

    first = start()
    for topic in ("sql", "shell"):
        first.publish(topic, weights(1.0), {})
        file = state / "aa" / topic / "1.safetensors"
        file.unlink() if cause == "unlinked" else file.write_bytes(b"torn")
    again = start()
    assert again.stable_versions() == {"sql": 2, "shell": 1, "general": 0}
    restored = again.stable_weights("sql")
    assert restored.weight_version == 2
    assert restored.reference.digest() == initial_weights.digest()
    assert again.stable_weights("shell") == SlotWeights(1)  # no initial ones either
    last = again.history("sql")[-1]
    assert (last["outcome"], last["version"], last["restored_from"]) == ("restored", 2, 0)
    assert start().stable_weights("sql").weight_version == 2
    assert again.publish("sql", weights(3.0), {}) == 3


def test_a_full_disk_loses_a_line_of_the_history_until_the_next_start_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reg = registry(tmp_path)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    async def scenario() -> Mapping[str, SlotWeights]:
        poll = asyncio.create_task(reg.wait_for_changes({"sql": 0}, None, 5.0))
        await asyncio.sleep(0.01)
        with monkeypatch.context() as patch:
            patch.setattr(WeightFiles, "append_history", full)
            assert reg.publish("sql", weights(1.0), {"records": 9, "loss": float("nan")}) == 1
            reg.reject("shell", {})  # not worth a trainer's round
        return (await asyncio.wait_for(poll, 1.0)).weights

    assert asyncio.run(scenario())["sql"].weight_version == 1
    assert [d["topic"] for d in reg.history()] == ["sql", "shell"]
    reg.record_decision("sql", {"outcome": "drift"})
    for _ in range(2):  # the line comes back once
        again = registry(tmp_path)
        assert sorted(d["outcome"] for d in again.history("sql")) == ["drift", "published"]
    published = next(d for d in again.history("sql") if d["outcome"] == "published")
    assert (published["version"], published["records"], published["time"]) == (1, 9, 7.0)


def test_weights_that_find_no_place_in_memory_are_not_announced(tmp_path: Path) -> None:
    refused: list[bool] = []

    def put(flat: FlatWeights) -> FlatWeights:
        if refused:
            raise MemoryError("the object store is full")
        return flat

    reg = WeightRegistry(str(tmp_path), TOPICS, "aa", put=put)
    reg.publish("sql", weights(1.0), {})
    refused.append(True)
    with pytest.raises(MemoryError):
        reg.publish("sql", weights(2.0), {})
    assert served(reg, "sql") == (1, 1.0)
    refused.clear()
    assert served(registry(tmp_path), "sql") == (1, 1.0)
    assert reg.publish("sql", weights(3.0), {}) == 2
    assert served(reg, "sql") == (2, 3.0)


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


def test_the_newest_weights_of_a_topic_come_with_their_version(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    assert reg.stable_weights("sql") == SlotWeights(0)
    reg.publish("sql", weights(1.0), {})
    stable = reg.stable_weights("sql")
    assert (stable.weight_version, float(unflatten(stable.reference)["w"][0])) == (1, 1.0)
    (tmp_path / "aa" / "sql" / "1.safetensors").unlink()
    assert registry(tmp_path).stable_weights("sql") == SlotWeights(1)
    with pytest.raises(KeyError):
        reg.stable_weights("poems")


def test_what_is_kept_of_a_decision_is_always_json(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    reg.reject("sql", {"loss": float("nan"), "figures": {"bound": float("-inf"), "few": [1.0]}})
    reg.publish("sql", weights(1.0), {"loss": float("inf")})
    for decisions in (reg.history(), registry(tmp_path).history()):
        assert [d["loss"] for d in decisions] == [None, None]
        assert decisions[0]["figures"] == {"bound": None, "few": [1.0]}
        json.dumps(decisions, allow_nan=False)
    with (tmp_path / "aa" / "history.jsonl").open("a") as file:
        file.write('{"topic": "sql", "time": 8.0, "loss": NaN}\n')  # as an earlier version wrote it
    assert registry(tmp_path).history()[-1] == {"topic": "sql", "time": 8.0, "loss": None}


def test_decisions_of_all_models_are_read_without_a_registry(tmp_path: Path) -> None:
    assert read_all_decisions(tmp_path / "nowhere") == []
    for at, mark in ((2.0, "aa"), (1.0, "bb"), (3.0, "aa")):
        file = tmp_path / "weights" / mark / "history.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        append_decision(file, {"time": at, "topic": "sql" if at < 3.0 else "shell"})
    assert [d["time"] for d in read_all_decisions(tmp_path)] == [1.0, 2.0, 3.0]
    assert [d["time"] for d in read_all_decisions(tmp_path, "sql")] == [1.0, 2.0]


HOLDER = """
import sys, time
from paceline.actors.weights.state_folder import lock_folder
lock_folder(sys.argv[1], 0.0)
print("held", flush=True)
time.sleep(120)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the folder."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_that_another_server_has_is_refused_until_that_one_dies(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_held", {})
    assert lock.is_locked(tmp_path)
    with pytest.raises(StateFolderLockedError, match=re.escape(str(tmp_path))):
        lock.lock_folder(tmp_path, wait_s=0.0)
    assert not (tmp_path / "aa").exists()
    holder.kill()  # no chance to clean up
    registry(tmp_path).publish("sql", weights(1.0), {})
    assert not lock.is_locked(tmp_path)  # this process has it: no other one


def test_asking_for_a_lock_leaves_no_trace(tmp_path: Path) -> None:
    assert not lock.is_locked(tmp_path / "nowhere")
    assert not lock.is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_topics_of_other_drafts_keep_their_versions(tmp_path: Path) -> None:
    """Sql and shell change drafts with each other; general's stays, and its versions do."""
    folders = {}
    for name in ("target", "a", "b", "c"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "model.safetensors").write_text(name)
    before = fingerprints(
        folders["target"], {"sql": folders["a"], "shell": folders["b"], "general": folders["c"]}
    )
    after = fingerprints(
        folders["target"], {"sql": folders["b"], "shell": folders["a"], "general": folders["c"]}
    )
    assert before["general"] == after["general"]
    assert before["sql"] != after["sql"]
    state = str(tmp_path / "state")
    first = WeightRegistry(state, TOPICS, before, put=lambda x: x)
    for topic in TOPICS:
        first.publish(topic, weights(1.0), {})
    second = WeightRegistry(state, TOPICS, after, put=lambda x: x)
    assert second.stable_versions() == {"sql": 0, "shell": 0, "general": 1}
    assert [d["topic"] for d in second.history()] != []
    again = WeightRegistry(state, TOPICS, before, put=lambda x: x)
    assert set(again.stable_versions().values()) == {1}
    assert {d["topic"] for d in again.history()} == set(TOPICS)


def test_topics_of_one_draft_share_a_fingerprint(tmp_path: Path) -> None:
    marks = fingerprints(tmp_path / "t", dict.fromkeys(TOPICS, tmp_path / "d"))
    assert set(marks.values()) == {fingerprint([tmp_path / "t", tmp_path / "d"])}


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    for name, text in (("config.json", "{}"), ("model.safetensors", "weights")):
        (tmp_path / name).write_text(text)
    before = fingerprint([tmp_path])
    assert before == fingerprint([tmp_path])
    (tmp_path / "README.md").write_text("not part of it")
    assert before == fingerprint([tmp_path])
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1}))
    assert before != fingerprint([tmp_path])


def test_a_subscriber_lags_until_it_has_loaded_a_topics_present_versions(tmp_path: Path) -> None:
    now = [1000.0]
    reg = WeightRegistry(str(tmp_path), TOPICS, "aa", put=lambda x: x, clock=lambda: now[0])

    def poll(name: str, known: dict[str, int]) -> None:
        asyncio.run(reg.wait_for_changes(known, None, 0.0, name))

    poll("one", {})
    poll("two", {})
    asyncio.run(reg.wait_for_changes(None, "", 0.0, "topics alone"))
    assert reg.topic_status()["sql"].subscribers == 2
    assert reg.topic_status()["sql"].lagging == ()
    version = reg.publish("sql", weights(1.0), {"records": 9})
    assert reg.topic_status()["sql"].lagging == ("one", "two")
    assert reg.topic_status()["shell"].lagging == ()
    poll("one", {"sql": version})
    assert reg.topic_status()["sql"].lagging == ("two",)
    now[0] += 40.0
    poll("one", {"sql": version})
    assert reg.topic_status()["sql"].lagging == ("two",)
    now[0] += 10.0  # two is gone
    assert (reg.topic_status()["sql"].subscribers, reg.topic_status()["sql"].lagging) == (1, ())


def test_an_expert_of_a_pool_subscribes_to_its_own_topic_alone(tmp_path: Path) -> None:
    reg = WeightRegistry(str(tmp_path), TOPICS, "aa", put=lambda x: x)
    asyncio.run(reg.wait_for_changes({}, None, 0.0, "expert-shell", "shell"))
    for topic in TOPICS:
        reg.publish(topic, weights(1.0), {"records": 9})
    found = {topic: (s.subscribers, s.lagging) for topic, s in reg.topic_status().items()}
    assert found.pop("shell") == (1, ("expert-shell",))
    assert set(found.values()) == {(0, ())}
