"""Synthetic records: stored prompts that the target answers again; drafts learn from them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import make_engine, request, run
from replay_samples import make_record
from tiny_models import save_tiny

from paceline.actors.engine.engine_loop import EngineLoop
from paceline.actors.engine.request import FINISH_YIELDED, GenerationChunk, GenerationRequest
from paceline.actors.replay.buffer import ReplaySettings, ShardStats, Split, SplitStats
from paceline.actors.replay.record import (
    ReplayRecord,
    belongs,
    decode,
    encode,
    is_held_out,
    is_synthetic,
    prompt_digest,
    source_id,
    synthetic_id,
)
from paceline.actors.replay.selection import is_scored
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.training.synthetic.answers import SyntheticSettings, further_answer
from paceline.actors.training.synthetic.generator import SyntheticAnswerGenerator, lacking
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.config.learning_settings import synthetic_settings

WAIT_S = 30.0


def test_a_stored_prompt_is_asked_again() -> None:
    source = make_record(prompt=(1, 3, 7, 8, 9, 4), length=5, created=77.0, temperature=0.0)
    source = replace(source, top_p=0.9, top_k=40, first_prompt=12)
    again = further_answer(source, "m")
    assert again.prompt_token_ids == (1, 3, 7, 8, 9, 4)
    assert (again.sampling.max_tokens, again.sampling.temperature) == (5, 0.7)
    warm = further_answer(replace(source, temperature=1.2), "m")
    assert warm.sampling.temperature == pytest.approx(1.2)
    long = make_record(prompt=(1, 3, 4), length=300)
    assert further_answer(long, "m").sampling.max_tokens == 256
    assert further_answer(long, "m").first_prompt == long.conversation
    assert (again.sampling.top_p, again.sampling.top_k) == (0.9, 40)
    assert (again.created, again.topic, again.first_prompt) == (77.0, "sql", 12)
    assert (again.has_record, again.background, again.draft) == (True, True, "off")
    assert source_id(again.request_id) == source.request_id


def test_names_lead_back_to_the_request() -> None:
    name = synthetic_id("chatcmpl-1-2", "7f")
    assert is_synthetic(name)
    assert not is_synthetic("chatcmpl-1-2")
    assert source_id("chatcmpl-1-2") == "chatcmpl-1-2"
    assert belongs(name, "chatcmpl-1-2")
    assert belongs(name, "chatcmpl-1")
    assert not belongs(name, "chatcmpl")
    assert belongs(name, name)


# --- what the shard does with them


def shard_of(per_record: float = 1.0, **settings: Any) -> ReplayShard:
    own = {"held_out_fraction": 0.3, "synthetic_per_record": per_record} | settings
    return ReplayShard("sql", ReplaySettings(**own), clock=lambda: 1_000.0, seed=0)


def kept(shard: ReplayShard, split: Any) -> list[ReplayRecord]:
    return [decode(data) for data in shard.sample(1_000, split)]


def test_synthetic_records_have_a_split_of_their_own_and_are_never_held_out() -> None:
    shard = shard_of()
    prompts = [(1, 3, n, n + 1, 4) for n in range(5, 105)]
    held_out = [p for p in prompts if is_held_out(prompt_digest(p), 0.3)]
    shard.insert(encode(make_record(request_id="real", prompt=prompts[0])))
    for n, prompt in enumerate(prompts):
        shard.insert(encode(make_record(request_id=synthetic_id("real", str(n)), prompt=prompt)))
    stats = shard.stats()
    assert stats.records("synthetic") == len(prompts) - len(held_out)
    assert stats.records("train") + stats.records("held_out") == 1
    assert {is_synthetic(record.request_id) for record in kept(shard, "synthetic")} == {True}
    assert [r.request_id for s in ("train", "held_out") for r in kept(shard, s)] == ["real"]


def test_a_purge_and_age_take_their_synthetic_records_along() -> None:
    shard = shard_of(held_out_fraction=0.0, retention_s=100.0)
    for n in range(4):
        for name in (f"r{n}", synthetic_id(f"r{n}", "a"), synthetic_id(f"r{n}", "b")):
            old = 850.0 if n == 3 else 1_000.0
            shard.insert(encode(make_record(request_id=name, created=old)))
    assert shard.stats().records("synthetic") == 6
    assert shard.delete("r1") == 3
    late = make_record(request_id=synthetic_id("r1", "c"))  # under way meanwhile
    shard.insert(encode(late))
    assert {source_id(r.request_id) for r in kept(shard, "synthetic")} == {"r0", "r2"}
    assert shard.delete(None) == 6


def test_synthetic_records_have_what_the_traffic_leaves() -> None:
    size = len(encode(make_record(request_id="r0000"))) + 64
    shard = shard_of(3.0, held_out_fraction=0.0, capacity_bytes=40 * size)

    def insert(name: str) -> ShardStats:
        shard.insert(encode(make_record(request_id=name)))
        stats = shard.stats()
        assert stats.bytes <= stats.capacity_bytes == stats.splits["train"].capacity_bytes
        assert stats.splits["synthetic"].capacity_bytes == 40 * size - stats.splits["train"].bytes
        return stats

    for n in range(5):
        insert(f"r{n:04}")
    for n in range(200):
        stats = insert(synthetic_id("r0000", str(n)))
    assert stats.records("train") == 5
    assert 25 <= stats.records("synthetic") <= 40
    for n in range(5, 100):
        before, stats = stats, insert(f"r{n:04}")
        assert stats.records("train") >= before.records("train")
        assert stats.records("synthetic") <= before.records("synthetic")
    assert stats.records("train") >= 38, "they make way for all that can be kept of the traffic"
    assert stats.records("synthetic") <= 2


def test_no_expert_is_scored_on_them() -> None:
    record = make_record()
    assert is_scored(record, 1.0, 0.0)
    assert not is_scored(replace(record, request_id=synthetic_id("r1", "m")), 1.0, 0.0)


# --- the engine's thread


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    loop = EngineLoop(make_engine(), num_threads=1)
    yield loop
    loop.close()


def send(loop: EngineLoop, wanted: GenerationRequest) -> queue.Queue[GenerationChunk]:
    chunks: queue.Queue[GenerationChunk] = queue.Queue()
    loop.submit(wanted, chunks.put)
    return chunks


def whole(chunks: queue.Queue[GenerationChunk]) -> tuple[list[int], str]:
    ids: list[int] = []
    while True:
        chunk = chunks.get(timeout=WAIT_S)
        ids += chunk.token_ids
        if chunk.finish_reason is not None:
            return ids, chunk.finish_reason


class Held:
    """Takes a request's chunks and has the engine's thread stand still at the first of them."""

    def __init__(self) -> None:
        self.chunks: queue.Queue[GenerationChunk] = queue.Queue()
        self._reached, self._go_on = threading.Event(), threading.Event()

    def __call__(self, chunk: GenerationChunk) -> None:
        self.chunks.put(chunk)
        self._reached.set()
        self._go_on.wait(WAIT_S)

    def reached(self) -> bool:
        return self._reached.wait(WAIT_S)

    def let_go(self) -> None:
        self._go_on.set()


def in_background(name: str, **fields: Any) -> GenerationRequest:
    asked = request(name, [5, 6], max_tokens=80, ignore_eos=True, draft="off", **fields)
    return replace(asked, background=True)


def test_what_runs_in_the_background_yields_to_a_request(loop: EngineLoop) -> None:
    plain = [o.chunk for o in run(make_engine(), [request("r", [7, 8])])["r"]]
    expected = [token for chunk in plain for token in chunk.token_ids]
    first = Held()
    loop.submit(in_background("b"), first)
    assert first.reached(), "it runs while serving is idle"
    assert loop.load() == (0, 0)
    answer = send(loop, request("r", [7, 8]))
    first.let_go()
    assert whole(first.chunks)[1] == FINISH_YIELDED
    assert whole(answer) == (expected, "length")
    assert whole(send(loop, in_background("again")))[1] == "length"


def test_nothing_begins_in_the_background_beside_a_request(loop: EngineLoop) -> None:
    held = Held()
    loop.submit(request("r", [7, 8], ignore_eos=True), held)
    assert held.reached()
    refused = send(loop, in_background("b"))
    held.let_go()
    assert whole(refused) == ([], FINISH_YIELDED)
    assert whole(held.chunks)[1] == "length"


def test_their_time_is_the_stored_one_s_and_requests_meters_do_not_see_them() -> None:
    records: list[ReplayRecord] = []
    loop = EngineLoop(make_engine(), num_threads=1, on_record=records.append)
    try:
        assert whole(send(loop, in_background("b", created=12.0)))[1] == "length"
        assert whole(send(loop, request("r", [7, 8])))[1] == "length"
        stats = loop.stats()
        assert stats.requests.generation_tokens == {"sql": 20}
        assert stats.rounds.tokens == 19  # the first came with the prompt
    finally:
        loop.close()
    assert [record.request_id for record in records] == ["b", "r"]
    assert records[0].created == 12.0
    assert records[1].created == 1234.5, "the engine's own clock"


# --- the generator


class LocalServing:
    """A shard and the engine's loop, as the generator sees them; permitted by ``idle``."""

    def __init__(self, per_record: float) -> None:
        self.shard = shard_of(per_record)
        self.asked: list[GenerationRequest] = []
        self.idle = True
        self.stored = self.put_count = 0
        engine = make_engine(vocab=16, target_seed=3)  # ends a text within some 16 tokens
        self.loop = EngineLoop(engine, num_threads=1, on_record=lambda r: self.put(r))

    def put(self, record: ReplayRecord) -> None:
        self.shard.insert(encode(replace(record, created=1_000.0)))
        self.put_count += is_synthetic(record.request_id)

    def stats(self) -> dict[str, ShardStats]:
        return {"sql": self.shard.stats()}

    def sample(self, topic: str, count: int, split: Any) -> list[ReplayRecord]:
        assert (topic, split) == ("sql", "train"), "only training records are sources"
        return [decode(data) for data in self.shard.sample(count, split)]

    def acquire_permit(self) -> bool:
        return self.idle

    def generate(self, requests: Sequence[GenerationRequest]) -> list[str]:
        self.asked += requests
        answers = [whole(send(self.loop, each)) for each in requests]
        kept = sum(
            r.store and e in ("stop", "length") for r, (_, e) in zip(requests, answers, strict=True)
        )
        self.stored += kept
        deadline = time.monotonic() + WAIT_S
        while self.put_count < self.stored and time.monotonic() < deadline:
            time.sleep(0.001)  # records come behind their last chunks
        return [reason for _, reason in answers]


@pytest.fixture
def serving() -> Iterator[LocalServing]:
    serving = LocalServing(per_record=0.5)
    rng = np.random.default_rng(5)
    for n in range(40):
        text = tuple(int(i) for i in rng.integers(5, 16, size=12))
        serving.put(make_record(request_id=f"r{n}", prompt=(1, 3, *text, 4), length=40, vocab=16))
    yield serving
    serving.loop.close()


def shard_stats(train: int, synthetic: int, used: float = 0.9, record_bytes: int = 0) -> ShardStats:
    """Statistics of a shard; ``used`` is the share of the synthetic records' capacity."""
    splits: dict[Split, SplitStats] = {
        "train": SplitStats(train, train * record_bytes, 100),
        "held_out": SplitStats(0, 0, 0),
        "synthetic": SplitStats(synthetic, int(100 * used), 100),
    }
    return ShardStats(
        splits=splits,
        bytes=0,
        capacity_bytes=200,
        inserted_total=0,
        inserted_synthetic_total=0,
        evicted_total=0,
        expired_total=0,
    )


def settings(per_record: float = 0.5, **more: Any) -> SyntheticSettings:
    return SyntheticSettings(per_record, at_once=4, **more)


def test_as_many_are_made_as_is_wanted_and_no_more(serving: LocalServing) -> None:
    generator = SyntheticAnswerGenerator(settings())
    wanted = serving.stats()["sql"].records("train") // 2
    for _ in range(400):
        generator.run_once(serving, serving)
    assert serving.stats()["sql"].records("synthetic") == wanted == generator.counts["made"]
    assert not generator.run_once(serving, serving)
    real = {r.request_id: r for r in kept(serving.shard, "train")}
    differ = 0
    for record in kept(serving.shard, "synthetic"):
        source = real[source_id(record.request_id)]
        assert record.prompt_token_ids.tolist() == source.prompt_token_ids.tolist()
        assert not is_held_out(record.conversation, 0.3)
        assert len(record.output_token_ids) <= len(source.output_token_ids)
        assert (record.expert, record.temperature) == ("off", 0.7)
        differ += record.output_token_ids.tolist() != source.output_token_ids.tolist()
    assert differ == wanted


def test_nothing_is_asked_without_a_permit_or_without_records(serving: LocalServing) -> None:
    serving.idle = False
    assert not SyntheticAnswerGenerator(settings()).run_once(serving, serving)
    assert serving.asked == []
    assert lacking({}, settings()) == (None, 0)
    assert lacking({"sql": shard_stats(7, 0)}, settings()) == (None, 0)
    few, full = shard_stats(100, 49), shard_stats(100, 10, used=0.96)
    assert lacking({"sql": few, "math": full}, settings()) == ("sql", 1)
    assert lacking({"sql": few}, settings(), {"sql": 3}) == (None, 0)
    assert lacking({"sql": few}, settings(most_records=150)) == ("sql", 1)
    assert lacking({"sql": few}, settings(most_records=149)) == (None, 0)
    assert lacking({"sql": shard_stats(200, 0)}, settings(most_records=149)) == (None, 0)
    assert lacking({"sql": few, "math": shard_stats(100, 45)}, settings()) == ("math", 5)
    for record_bytes, lacks in ((10, ("sql", 1)), (11, (None, 0))):
        few = shard_stats(100, 49, used=0.9, record_bytes=record_bytes)
        assert lacking({"sql": few}, settings()) == lacks


def test_what_yields_is_counted_and_leaves_nothing(serving: LocalServing) -> None:
    held = Held()
    serving.loop.submit(request("r", [7, 8], ignore_eos=True), held)
    assert held.reached()
    generator = SyntheticAnswerGenerator(settings())
    ticking = threading.Thread(target=generator.run_once, args=(serving, serving))
    ticking.start()
    while not serving.asked:
        time.sleep(0.001)
    time.sleep(0.05)  # its first request is in the loop's inbox
    held.let_go()
    ticking.join(WAIT_S)
    assert whole(held.chunks)[1] == "length"
    assert generator.counts["yielded"] > 0
    assert generator.counts["made"] == serving.stats()["sql"].records("synthetic")


def test_a_topic_that_yields_no_answers_does_not_block_the_others(
    serving: LocalServing,
) -> None:
    both, plain = serving.stats, serving.sample
    serving.stats = lambda: both() | {"untold": shard_stats(10_000, 0)}  # type: ignore[method-assign]
    serving.sample = lambda topic, *rest: plain(topic, *rest) if topic == "sql" else []  # type: ignore[method-assign]
    calls: list[int] = []
    generate = serving.generate
    serving.generate = lambda asked: calls.append(len(asked)) or generate(asked)  # type: ignore[method-assign, func-returns-value]
    generator = SyntheticAnswerGenerator(settings())
    for _ in range(100):
        generator.run_once(serving, serving)
    assert generator.counts["made"] >= 10
    assert calls.count(0) <= 8, "it rests longer each time"


class Vain:
    """A target that keeps nothing: it yields, it fails, or its records are lost."""

    def __init__(self, reason: str) -> None:
        self.calls, self._reason = 0, reason

    def generate(self, requests: Sequence[GenerationRequest]) -> list[str]:
        self.calls += 1
        if self._reason == "error":
            raise TimeoutError
        return [self._reason] * len(requests)


@pytest.mark.parametrize("reason", [FINISH_YIELDED, "stop", "error"])
def test_what_brings_nothing_is_asked_for_ever_more_rarely(
    serving: LocalServing, reason: str
) -> None:
    generator, vain = SyntheticAnswerGenerator(settings()), Vain(reason)
    for _ in range(200):
        with suppress(TimeoutError):
            generator.run_once(serving, vain)
    assert 3 <= vain.calls <= 9


def test_a_later_turn_stays_in_its_conversation(serving: LocalServing) -> None:
    """By its own prompt it would be held out, and dropped."""
    own = next(p for n in range(99) if is_held_out(prompt_digest(p := (1, 3, n, 9, 4)), 0.3))
    first = next(d for n in range(99) if not is_held_out(d := prompt_digest((n, 4)), 0.3))
    later = replace(make_record(request_id="later", prompt=own, vocab=16), first_prompt=first)
    serving.sample = lambda *_: [later]  # type: ignore[method-assign]
    serving.put(later)
    SyntheticAnswerGenerator(settings()).run_once(serving, serving)
    (made,) = kept(serving.shard, "synthetic")
    assert (source_id(made.request_id), made.conversation) == ("later", first)


# --- the config


def config_of(folder: Path, **changes: Any) -> PacelineConfig:
    save_tiny(folder, 1)
    return load_config(None, {"target.path": str(folder)} | changes)


def test_none_are_made_where_nothing_learns_or_they_are_turned_off(tmp_path: Path) -> None:
    for off in ({"training.synthetic_per_record": 0}, {"training.enabled": False}):
        assert synthetic_settings(config_of(tmp_path, **off)) is None
    asked = {"training.synthetic_per_record": 2.0, "target.max_num_seqs": 2}
    found = synthetic_settings(config_of(tmp_path, **asked))
    assert found is not None
    assert (found.per_record, found.at_once) == (2.0, 2)
