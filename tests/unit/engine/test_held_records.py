"""Records stay with the engine while requests run, where purges reach them, and leave after."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import make_engine, request
from replay_samples import make_record
from tiny_models import tiny_tokenizer
from waiting import wait_until

from paceline.actors.engine.engine_loop import EngineLoop
from paceline.actors.engine.request import GenerationChunk, GenerationRequest
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.target import TargetReplica
from paceline.actors.replay import held_records
from paceline.actors.replay.held_records import HeldRecords
from paceline.actors.replay.record import ReplayRecord, decode, prompt_digest
from paceline.actors.replay.selection import LeftOut

NEVER = 3600.0


def answered(loop: EngineLoop, wanted: GenerationRequest) -> GenerationChunk:
    """Run a request; returns its last chunk."""
    chunks: queue.Queue[GenerationChunk] = queue.Queue()
    loop.submit(wanted, chunks.put)
    while (chunk := chunks.get(timeout=20)).finish_reason is None:
        pass
    return chunk


class World:
    """An engine with its held records, and what it has handed over."""

    def __init__(self) -> None:
        self.held, self.sent = HeldRecords(LeftOut()), list[ReplayRecord]()
        self.loop = EngineLoop(
            make_engine(), num_threads=1, on_record=self.sent.append, held_records=self.held
        )

    def answer(self, *names: str) -> None:
        for name in names:
            answered(self.loop, request(name, [5, 7], ignore_eos=True))
        wait_until(lambda: len(self.held) + len(self.sent) >= len(names), "the records")

    @property
    def names(self) -> list[str]:
        return [record.request_id for record in self.sent]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.loop.close()


def test_an_idle_engine_hands_over_all_in_order(world: World) -> None:
    world.answer("a", "b", "c")
    wait_until(lambda: len(world.sent) == 3, "the records")
    assert world.names == ["a", "b", "c"]
    assert (len(world.held), world.held.num_bytes) == (0, 0)


def test_a_request_does_not_wait_for_a_hand_over() -> None:
    held, sending, sent = HeldRecords(LeftOut()), threading.Event(), threading.Event()
    held.add(make_record(), 0.0)

    def send(_: ReplayRecord) -> None:
        sending.set()
        assert sent.wait(20)

    handing_over = threading.Thread(target=held.hand_over, args=(send, 0.0))
    handing_over.start()
    assert sending.wait(20)
    asked = threading.Thread(target=held.has_room, args=("sql",), daemon=True)
    asked.start()
    asked.join(20)
    waits = asked.is_alive()
    sent.set()
    handing_over.join()
    assert not waits


def test_what_is_purged_before_is_never_handed_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_records, "_IDLE_S", NEVER)
    world.answer("cmpl-a-0", "cmpl-a-1", "cmpl-b-0")
    assert world.held.remove("cmpl-a", None) == 2
    world.loop.close()
    assert world.names == ["cmpl-b-0"]


def test_a_closed_engine_has_handed_over_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_records, "_IDLE_S", NEVER)
    world.answer("a", "b")
    assert world.sent == []
    world.loop.close()
    assert world.names == ["a", "b"]


def test_traffic_that_never_pauses_has_records_handed_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_records, "_IDLE_S", NEVER)
    monkeypatch.setattr(held_records, "_BUSY_S", 0.0)
    world.answer("a", "b", "c", "d")
    assert world.names[:2] == ["a", "b"]


def test_a_replica_purges_and_expires_what_it_holds_and_hands_over_the_rest(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_records, "_IDLE_S", NEVER)
    records: list[ReplayRecord] = []

    def insert(data: bytes, _left_out: int) -> None:
        records.append(decode(data))

    shard: Any = SimpleNamespace(insert=SimpleNamespace(remote=insert))
    settings = TargetSettings(
        str(target_folder), dtype="float32", num_threads=1, max_num_seqs=4, retention_s=60.0
    )
    replica = TargetReplica(settings, {"general": shard})
    for name in ("cmpl-a-0", "cmpl-b-0", "cmpl-c-0"):
        answered(
            replica._loop, request(name, [5, 7], draft="general", topic="general", ignore_eos=True)
        )
    wait_until(lambda: len(replica._held_records) == 3, "the records")
    assert asyncio.run(replica.purge("cmpl-a", None)) == 1
    assert asyncio.run(replica.purge("cmpl-a", None)) == 0
    replica.check_health()
    assert len(replica._held_records) == 2
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61.0)
    replica.check_health()
    assert len(replica._held_records) == 0
    answered(
        replica._loop,
        request("cmpl-d-0", [5, 7], draft="general", topic="general", ignore_eos=True),
    )
    replica.__del__()
    assert [record.request_id for record in records] == ["cmpl-d-0"]


def test_records_of_a_conversation_name_its_first_prompt(target_folder: Path) -> None:
    records: list[ReplayRecord] = []

    def insert(data: bytes, _left_out: int) -> None:
        records.append(decode(data))

    shard: Any = SimpleNamespace(insert=SimpleNamespace(remote=insert))
    settings = TargetSettings(str(target_folder), dtype="float32", num_threads=1, max_num_seqs=4)
    replica, tokenizer = TargetReplica(settings, {"general": shard}), tiny_tokenizer()
    chat = [{"role": "user", "content": "how many?"}]

    def ask(name: str) -> None:
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        own = request(f"{name}-0", ids, draft="general", topic="general", ignore_eos=True)
        answered(replica._loop, own)
        wait_until(lambda: len(records) == int(name), "the record")

    ask("1")
    chat += [{"role": "assistant", "content": "4"}, {"role": "user", "content": "of what?"}]
    ask("2")
    chat[0]["content"] = "why?"
    ask("3")
    replica.__del__()
    first, second, other = (record.conversation for record in records)
    assert first == second == prompt_digest(records[0].prompt_token_ids)
    assert other == prompt_digest(records[2].prompt_token_ids)


def test_only_a_purge_of_all_empties_the_prefix_cache(target_folder: Path) -> None:
    settings = TargetSettings(str(target_folder), dtype="float32", num_threads=1, max_num_seqs=4)
    replica = TargetReplica(settings)

    def cached() -> int:
        return answered(replica._loop, request("r", range(3, 40))).num_cached_tokens

    assert (cached(), cached()) == (0, 32)
    for purge in (("r", None), (None, "sql")):
        asyncio.run(replica.purge(*purge))
        assert cached() == 32
    asyncio.run(replica.purge(None, None))
    assert (cached(), cached()) == (0, 32)
    replica.__del__()
