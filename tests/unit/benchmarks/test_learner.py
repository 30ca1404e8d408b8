"""What studies of learning stand on: kept results and answers, prompts, the trainer in process."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import prompts
import pytest
import torch
from engines import engine_of, make_engine, served
from harness import Store
from local_client import trainer_settings
from online.lab import QUICK, Lab, lab_arguments
from online.learner import NEVER, Learner, Learning
from prompts import Prompt
from tiny_models import tiny_llama
from training_records import training_record

from paceline.actors.replay.buffer import ReplaySettings
from paceline.deploy.recipes.data import DataError


def test_a_unit_is_made_once_for_its_settings(tmp_path: Path) -> None:
    store, made = Store(tmp_path), []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"figure": 1.5}

    for _ in range(2):
        assert store.unit("stream", {"k": (4, 5)}, make) == {"figure": 1.5}
    assert len(made) == 1
    store.unit("stream", {"k": (4, 6)}, make)
    assert len(made) == 2


def test_half_a_result_and_one_of_other_settings_do_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("stream", {"k": 4}, {"figure": 1})
    path = store.path("stream", {"k": 4})
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) // 2], encoding="utf-8")
    assert store.find("stream", {"k": 4}) is None
    path.write_text(whole.replace('"k": 4', '"k": 5'), encoding="utf-8")
    assert store.find("stream", {"k": 4}) is None


class Words:
    """A tokenizer whose tokens are the text's words, numbered as they come."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> list[int]:
        words = messages[0]["content"].split()
        return [self.ids.setdefault(word, len(self.ids)) for word in words]


def test_no_prompt_of_the_test_is_in_the_stream(tmp_path: Path) -> None:
    texts = [f"How many rows has table {i} ?" for i in range(30)]
    for split, part in (("test", texts[:10]), ("train", texts)):
        with gzip.open(tmp_path / f"sql_{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            for number, text in enumerate([*part, part[0], "word " * 500]):
                row = {"id": f"spider-{split}-{number}", "topic": "sql", "prompt": text}
                file.write(json.dumps(row) + "\n")
    data, words = str(tmp_path), Words()
    test = prompts.measured_prompts(data, "sql", words, 8)
    train = prompts.training_prompts(data, "sql", words)
    assert (len(test), len(train)) == (8, 20)  # none of those that a longer test would take
    assert not {p.token_ids for p in test} & {p.token_ids for p in train}
    fewer = prompts.training_prompts(data, "sql", words, 5)
    assert fewer == train[:5]
    with pytest.raises(DataError, match="math"):
        prompts.measured_prompts(data, "math", words)


def test_the_generator_serves_who_has_no_data() -> None:
    train = prompts.training_prompts(None, "shell", Words(), 20)
    assert len(train) == 20
    assert all(prompt.text for prompt in train)
    with pytest.raises(DataError, match="--data"):
        prompts.training_prompts(None, "finance", Words(), 20)


def test_no_two_generated_prompts_have_a_key_in_common() -> None:
    words = Words()
    both = [
        side(None, topic, words, 20)
        for topic in ("sql", "shell")
        for side in (prompts.measured_prompts, prompts.training_prompts)
    ]
    # the engine tells the requests of a mixed stream by them
    assert len({p.key for found in both for p in found}) == 80


def test_prompts_of_the_same_keys_and_other_tokens_are_others() -> None:
    some = questions(3)
    other = [replace(some[0], token_ids=(1, 2)), *some[1:]]
    assert prompts.mark_of(some) == prompts.mark_of(questions(3)) != prompts.mark_of(other)


def questions(count: int) -> list[Prompt]:
    return [Prompt(f"q{i}", "sql", (1, 3 + i, 4, 5)) for i in range(count)]


class TinyLab(Lab):
    """A lab of short answers with an engine of tiny models, counted."""

    engines = 0

    def __init__(self, out: Path) -> None:
        line = ["--quick", "--target", "small", "--out", str(out)]
        super().__init__(lab_arguments("A lab.").parse_args(line), replace(QUICK, max_tokens=6))

    def engine(self, *_: Any, **__: Any) -> Any:
        TinyLab.engines += 1
        return make_engine()


def test_served_prompts_come_with_their_records_and_counts(tmp_path: Path) -> None:
    lab = TinyLab(tmp_path)
    done = list(lab.serve(lab.engine(), questions(9), lambda _: "a"))
    assert {one.key for one in done} == {p.key for p in questions(9)}
    for one in done:
        assert one.record is not None
        assert one.key == one.record.request_id
        assert one.drafted.rounds > 0
        assert one.drafted.drafted is not None
        assert one.drafted.accepted <= one.drafted.drafted
        assert list(one.token_ids) == one.record.output_token_ids.tolist()


def test_answers_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    TinyLab.engines = 0

    def ask(some: list[Prompt]) -> list[tuple[int, ...]]:
        found = TinyLab(tmp_path).records("sql", some)
        assert [r.request_id for r in found] == [p.key for p in some]
        return [tuple(r.output_token_ids.tolist()) for r in found]

    first = ask(questions(6))
    assert ask(questions(6)) == first
    assert ask(questions(4)) == first[:4]
    assert TinyLab.engines == 1
    (file,) = tmp_path.rglob("*.records")
    file.write_bytes(file.read_bytes()[:-7])  # as a killed run leaves it
    assert ask(questions(8))[:6] == first
    assert TinyLab.engines == 2
    assert ask(questions(8))[:6] == first
    assert TinyLab.engines == 2
    other = [Prompt("q0", "sql", (9, 8, 7)), *questions(8)[1:]]  # q0 is another prompt now
    found = TinyLab(tmp_path).records("sql", other)
    assert found[0].prompt_token_ids.tolist() == [9, 8, 7]
    assert tuple(found[5].output_token_ids.tolist()) == first[5]
    assert TinyLab.engines == 3


def test_everything_that_decides_a_unit_is_in_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_GENERATED", 400)  # it uses the first 64

    def settings(*more: str) -> dict[str, Any]:
        line = ["--quick", "--target", "small", "--out", str(tmp_path), *more]
        return Lab(lab_arguments("A lab.").parse_args(line), QUICK).settings(["sql"], {})

    usual = settings()
    assert json.loads(json.dumps(usual, allow_nan=False)) == json.loads(json.dumps(settings()))
    assert str(Path(__file__).parents[3]) not in json.dumps(usual)  # no place of this machine
    for more in (
        ("--dtype", "float32"),
        ("--threads", "1"),
        ("--set", "training.learning_rate=0.001"),
        ("--set", "training.min_gain=0.1", "replay.sampler=priority"),
    ):
        assert settings(*more) != usual


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft")
    tiny_llama(2, vocab=300, layers=1).save_pretrained(path)
    return path


def learn(folder: Path, draft: Path) -> tuple[Learner, Any]:
    engine = engine_of(
        served(tiny_llama(1, vocab=300)), [{"a": served(tiny_llama(2, layers=1, vocab=300))}]
    )
    learning = Learning(requests_per_round=20, micro_steps=6)
    settings, replay = trainer_settings(draft, ("a",)), ReplaySettings(held_out_fraction=0.3)
    learner = Learner(folder, settings, learning, engine.updates.put, replay=replay)
    for number in range(60):
        learner.add(training_record(number, created=time.time()), "a")
    return learner, engine


@pytest.mark.usefixtures("deepspeed")
def test_learning_goes_by_count_and_reaches_the_engine(tmp_path: Path, draft_folder: Path) -> None:
    learner, engine = learn(tmp_path / "one", draft_folder)
    facts = learner.facts()
    assert facts["micro_steps"] == 3 * 6
    version, state = learner.served("a")
    assert facts["published"] == version > 0
    list(TinyLab(tmp_path).serve(engine, questions(1), lambda _: "a"))
    assert engine.drafts()["a"] == version
    again, _ = learn(tmp_path / "two", draft_folder)
    _, same = again.served("a")
    assert state is not None
    assert same is not None
    assert all(torch.equal(state[name], same[name]) for name in state)


def test_a_learner_rests_after_rounds_without_a_gain_unless_it_must_not(
    tmp_path: Path, draft_folder: Path
) -> None:
    settings = trainer_settings(draft_folder, ("a",))
    usual, never = (
        Learner(tmp_path / str(rests), settings, Learning(rests=rests)) for rests in (True, False)
    )
    assert usual._loop._settings.schedule == settings.schedule
    assert never._loop._settings.schedule.max_rejections == NEVER
