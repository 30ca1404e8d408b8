"""Synthetic prompts: the beginning of a stored one, continued by the target; drafts learn them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import make_engine, request, run
from hypothesis import given
from hypothesis import strategies as st
from replay_samples import make_record
from tiny_models import save_tiny, tiny_tokenizer

from paceline.actors.engine.engine_loop import EngineLoop
from paceline.actors.engine.request import FINISH_YIELDED, GenerationChunk, GenerationRequest
from paceline.actors.engine.turn_marks import TurnMarks, turn_marks
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
from paceline.actors.training.synthetic.generator import (
    Completion,
    SyntheticPromptGenerator,
    lacking,
)
from paceline.actors.training.synthetic.prompts import (
    SyntheticSettings,
    answer_request,
    cut_prompt,
    prompt_request,
    synthetic_prompt,
)
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.config.learning_settings import synthetic_settings
from paceline.deploy.errors import ConfigError

MARKS = TurnMarks(opening=(3,), cue=(4,))
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
WAIT_S = 30.0


def test_the_marks_of_the_small_target_s_form() -> None:
    assert turn_marks(tiny_tokenizer()) == MARKS


def test_the_marks_of_a_form_with_system_prompts_and_roles() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    marks = turn_marks(tokenizer)
    assert tokenizer.decode(marks.cue) == "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(marks.opening).endswith("<|im_start|>user\n")
    later = [("user", "hello there"), ("assistant", "yes"), ("user", "and what else is new")]
    for turns in (later[2:], later):
        chat = [{"role": role, "content": text} for role, text in turns]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        kept = cut_prompt(ids, marks, np.random.default_rng(0))
        assert kept is not None
        before, _, text = tokenizer.decode(kept).rpartition("<|im_start|>user\n")
        assert tokenizer.decode(ids).startswith(before)
        assert text
        assert "and what else is new".startswith(text)


@pytest.mark.parametrize("template", [None, "", WORDS, "{{ raise_exception('no') }}", "{% if"])
def test_forms_without_marks_are_refused(template: str | None) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"chat template"):
        turn_marks(tokenizer)


@given(
    st.lists(st.integers(5, 299), min_size=2, max_size=40),
    st.lists(st.integers(5, 299), max_size=10),
    st.integers(0, 2**32 - 1),
)
def test_a_beginning_keeps_two_to_eight_tokens_of_the_last_text(
    text: list[int], history: list[int], seed: int
) -> None:
    head = [1, 3, *history, 2, 3]
    kept = cut_prompt([*head, *text, 4], MARKS, np.random.default_rng(seed))
    assert kept is not None
    own = list(kept[len(head) :])
    assert list(kept[: len(head)]) == head
    assert own == text[: len(own)]
    assert min(2, len(text) - 1) <= len(own) <= min(8, len(text) - 1)


@pytest.mark.parametrize("prompt", [(), (5, 6, 7), (1, 3, 9, 4), (1, 5, 6, 7, 4), (1, 3, 5, 6, 7)])
def test_what_is_no_templated_prompt_is_left_alone(prompt: tuple[int, ...]) -> None:
    assert cut_prompt(prompt, MARKS, np.random.default_rng(0)) is None


def test_prompt_and_answer_stay_within_what_was_stored() -> None:
    source = make_record(prompt=(1, 3, 7, 8, 9, 4), length=5, created=77.0, temperature=0.7)
    asked = prompt_request(source, (1, 3, 7), MARKS, "m")
    assert (asked.store, asked.background, asked.draft) == (False, True, "off")
    longest = asked.sampling.max_tokens
    assert 3 + longest + len(MARKS.cue) == 6 + 5
    assert synthetic_prompt((1, 3, 7), (10, 11, 4), MARKS) == (1, 3, 7, 10, 11, 4)
    assert synthetic_prompt((1, 3, 7), (10, 11, 2), MARKS) is None
    assert synthetic_prompt((1, 3, 7), (10, 4), MARKS) is None
    answer = answer_request(source, (1, 3, 7, 10, 11, 12, 13, 4), "m")
    assert answer is not None
    assert (answer.sampling.max_tokens, answer.sampling.temperature) == (3, 0.7)
    assert (answer.created, answer.topic, answer.store) == (77.0, "sql", True)
    assert source_id(answer.request_id) == source.request_id
    assert answer_request(source, (1, 3, 7, 8, 9, 4), "m") is None, "the stored prompt itself"
    assert answer_request(source, (1, 3, *range(5, 13), 4), "m") is None, "no room for an answer"


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
        assert stats.rounds.tokens == 20
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

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.asked += requests
        answers = [whole(send(self.loop, each)) for each in requests]
        kept = sum(
            r.store and e in ("stop", "length") for r, (_, e) in zip(requests, answers, strict=True)
        )
        self.stored += kept
        deadline = time.monotonic() + WAIT_S
        while self.put_count < self.stored and time.monotonic() < deadline:
            time.sleep(0.001)  # records come behind their last chunks
        return [Completion(tuple(ids), reason) for ids, reason in answers]


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


def settings(per_record: float = 0.5) -> SyntheticSettings:
    return SyntheticSettings(MARKS, per_record, held_out_fraction=0.3, at_once=4, seed=0)


def test_as_many_are_made_as_is_wanted_and_no_more(serving: LocalServing) -> None:
    generator = SyntheticPromptGenerator(settings())
    wanted = serving.stats()["sql"].records("train") // 2
    for _ in range(400):
        generator.run_once(serving, serving)
    assert serving.stats()["sql"].records("synthetic") == wanted == generator.counts["made"]
    assert not generator.run_once(serving, serving)
    real = {r.request_id: r for r in kept(serving.shard, "train")}
    for record in kept(serving.shard, "synthetic"):
        source = real[source_id(record.request_id)]
        prompt, stored = record.prompt_token_ids.tolist(), source.prompt_token_ids.tolist()
        assert prompt[:4] == stored[:4]
        assert prompt[-1] == 4
        assert prompt != stored
        assert not is_held_out(record.conversation, 0.3)
        assert len(prompt) + len(record.output_token_ids) <= len(stored) + 40
        assert record.expert == "off"


def test_nothing_is_asked_without_a_permit_or_without_records(serving: LocalServing) -> None:
    serving.idle = False
    assert not SyntheticPromptGenerator(settings()).run_once(serving, serving)
    assert serving.asked == []
    assert lacking({}, settings()) == (None, 0)
    assert lacking({"sql": shard_stats(7, 0)}, settings()) == (None, 0)
    few, full = shard_stats(100, 49), shard_stats(100, 10, used=0.96)
    assert lacking({"sql": few, "math": full}, settings()) == ("sql", 1)
    assert lacking({"sql": few}, settings(), {"sql": 3}) == (None, 0)
    assert lacking({"sql": few, "math": shard_stats(100, 45)}, settings()) == ("math", 5)
    for record_bytes, lacks in ((10, ("sql", 1)), (11, (None, 0))):
        few = shard_stats(100, 49, used=0.9, record_bytes=record_bytes)
        assert lacking({"sql": few}, settings()) == lacks


def test_what_yields_is_counted_and_leaves_nothing(serving: LocalServing) -> None:
    held = Held()
    serving.loop.submit(request("r", [7, 8], ignore_eos=True), held)
    assert held.reached()
    generator = SyntheticPromptGenerator(settings())
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


def test_a_topic_that_yields_no_prompts_does_not_block_the_others(
    serving: LocalServing,
) -> None:
    both, plain = serving.stats, serving.sample
    serving.stats = lambda: both() | {"untold": shard_stats(10_000, 0)}  # type: ignore[method-assign]
    raw = make_record(prompt=(5, 6, 7))

    def sample(topic: str, count: int, split: Any) -> list[ReplayRecord]:
        return [raw] * count if topic == "untold" else plain(topic, count, split)

    serving.sample = sample  # type: ignore[method-assign]
    generator = SyntheticPromptGenerator(settings())
    for _ in range(100):
        generator.run_once(serving, serving)
    assert generator.counts["made"] >= 10
    assert generator.counts["unsuited"] <= 4 * 8, "it rests longer each time"


# --- the config


def config_of(folder: Path, **changes: Any) -> PacelineConfig:
    save_tiny(folder, 1)
    return load_config(None, {"target.path": str(folder)} | changes)


def test_no_prompts_are_made_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert synthetic_settings(config_of(tmp_path)) is None
    asked = {"training.synthetic_per_record": 2.0}
    assert synthetic_settings(config_of(tmp_path, **asked, **{"training.enabled": False})) is None
    found = synthetic_settings(config_of(tmp_path, **asked, **{"target.max_num_seqs": 2}))
    assert found is not None
    assert (found.marks, found.per_record, found.at_once) == (MARKS, 2.0, 2)


def test_a_template_that_does_not_allow_it_is_refused_at_the_start(tmp_path: Path) -> None:
    config = config_of(tmp_path, **{"training.synthetic_per_record": 2.0})
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = WORDS
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"training\.synthetic_per_record: .* ordinary token"):
        synthetic_settings(config)
