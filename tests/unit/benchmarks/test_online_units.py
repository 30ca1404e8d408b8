"""Units of work that resume: results, prompts, answers, and the trainer beside the engine."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_of, make_engine, served
from harness import Store
from online import rows
from online.__main__ import synthetic_of
from online.learner import Learner, Learning, Synthetic, trainer_facts
from online.rows import Question
from online.serving import Serving, answers_of, serve
from tiny_models import tiny_llama
from training_records import training_record

from paceline.deploy.recipes.data import DataError

SERVING = Serving(max_tokens=6)
PUBLISHED = Path(__file__).parents[3] / "docs/results"


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
    assert [kept["settings"]["k"] for kept in store.every("stream")] != []


def test_half_a_result_and_one_of_other_settings_do_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put("stream", {"k": 4}, {"figure": 1})
    path = store.path("stream", {"k": 4})
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) // 2], encoding="utf-8")
    assert store.find("stream", {"k": 4}) is None
    assert list(store.every("stream")) == []
    path.write_text(whole.replace('"k": 4', '"k": 5'), encoding="utf-8")
    assert store.find("stream", {"k": 4}) is None


def test_published_results_are_gone_on_from_on_another_machine(tmp_path: Path) -> None:
    published = tmp_path / "published"
    Store(tmp_path / "one", published).put("stream", {"k": (4,)}, {"figure": 1})
    (path,) = published.iterdir()
    first = path.read_bytes()
    Store(tmp_path / "one", published).put("stream", {"k": (4,)}, {"figure": 1})
    assert path.read_bytes() == first  # the same result is the same file
    assert Store(tmp_path / "two", published).find("stream", {"k": (4,)}) == {"figure": 1}
    assert Store(tmp_path / "two", published).find("stream", {"k": (5,)}) is None
    assert Store(tmp_path / "two").find("stream", {"k": (4,)}) is None
    Store(tmp_path / "two", published).put("stress", {}, {"figure": 2})
    Store(tmp_path / "three").put("stroll", {}, {"figure": 3})
    both = Store(tmp_path / "one", published).every("str")
    assert [unit["result"]["figure"] for unit in both] == [1, 2]
    path.write_bytes(first[: len(first) // 2])
    assert Store(tmp_path / "one", published).find("stream", {"k": (4,)}) == {"figure": 1}
    assert path.read_bytes() == first  # whoever has it mends it
    path.write_bytes(first[: len(first) // 2])
    assert Store(tmp_path / "two", published).find("stream", {"k": (4,)}) is None


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
    found = rows.load(str(tmp_path), "sql", Words(), train=None, test=8)
    test, train = ({q.token_ids for q in part} for part in (found.test, found.train))
    assert len(test) == len(found.test) == 8
    assert len(train) == len(found.train) == 22
    assert not test & train
    fewer = rows.load(str(tmp_path), "sql", Words(), train=5, test=8)
    assert [q.key for q in fewer.train] == [q.key for q in found.train[:5]]
    with pytest.raises(DataError, match="math"):
        rows.load(str(tmp_path), "math", Words(), train=5, test=8)


def test_the_generator_serves_who_has_no_data() -> None:
    found = rows.load(None, "shell", Words(), train=20, test=5)
    assert len(found.train) == 20
    assert not {q.token_ids for q in found.train} & {q.token_ids for q in found.test}
    with pytest.raises(DataError, match="--data"):
        rows.load(None, "finance", Words(), train=20, test=5)


def test_no_two_generated_prompts_have_a_key_in_common() -> None:
    both = [rows.load(None, topic, Words(), train=20, test=5) for topic in ("sql", "shell")]
    keys = [q.key for found in both for q in (*found.train, *found.test)]
    assert len(set(keys)) == 50  # the engine tells the requests of a mixed stream by them


def test_prompts_of_the_same_keys_and_other_tokens_are_others() -> None:
    some = questions(3)
    other = [replace(some[0], token_ids=(1, 2)), *some[1:]]
    assert rows.mark_of(some) == rows.mark_of(questions(3)) != rows.mark_of(other)


def questions(count: int) -> list[Question]:
    return [Question(f"q{i}", "sql", (1, 3 + i, 4, 5)) for i in range(count)]


def test_served_prompts_come_with_their_records_and_counts() -> None:
    done = list(serve(make_engine(), questions(9), ["a"] * 9, SERVING, first=40))
    assert sorted(s.number for s in done) == list(range(40, 49))
    for one in done:
        assert one.key == one.record.request_id
        assert one.rounds > 0
        assert one.accepted <= one.drafted
        assert one.tokens == len(one.record.output_token_ids)


def test_answers_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    engines = 0

    def engine() -> Any:
        nonlocal engines
        engines += 1
        return make_engine()

    def ask(count: int) -> list[list[int]]:
        found = answers_of(tmp_path, "sql", questions(count), SERVING, engine, draft="a@0")
        assert [s.key for s in found] == [f"q{i}" for i in range(count)]
        assert [s.number for s in found] == list(range(count))
        return [s.record.output_token_ids.tolist() for s in found]

    first = ask(6)
    assert ask(6) == first
    assert ask(4) == first[:4]
    assert engines == 1
    (file,) = tmp_path.glob("*.records")
    file.write_bytes(file.read_bytes()[:-7])  # as a killed run leaves it
    assert ask(8)[:6] == first
    assert engines == 2
    assert ask(8)[:6] == first
    assert engines == 2
    other = [Question("q0", "sql", (9, 8, 7)), *questions(8)[1:]]  # q0 is another prompt now
    found = answers_of(tmp_path, "sql", other, SERVING, engine, draft="a@0")
    assert found[0].record.prompt_token_ids.tolist() == [9, 8, 7]
    assert found[5].record.output_token_ids.tolist() == first[5]
    assert engines == 3


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft")
    tiny_llama(2, vocab=300, layers=1).save_pretrained(path)
    return path


def learn(folder: Path, draft: Path) -> tuple[Learner, Any]:
    engine = engine_of(
        served(tiny_llama(1, vocab=300)), [{"a": served(tiny_llama(2, layers=1, vocab=300))}]
    )
    learning = Learning(
        requests_per_round=20, micro_steps=6, learning_rate=5e-3, held_out_fraction=0.3
    )
    learner = Learner(folder, ["a"], learning, engine.updates.put, draft=draft)
    for number in range(60):
        learner.add(replace(training_record(number, created=time.time()), topic="a"))
    return learner, engine


@pytest.mark.usefixtures("deepspeed")
def test_learning_goes_by_count_and_reaches_the_engine(tmp_path: Path, draft_folder: Path) -> None:
    learner, engine = learn(tmp_path / "one", draft_folder)
    facts = learner.facts()
    assert facts["micro_steps"] == 3 * 6
    assert facts["positions"] > 0
    version, state = learner.served("a")
    assert facts["published"] == version > 0
    list(serve(engine, questions(1), ["a"], SERVING))
    assert engine.drafts()["a"] == version
    again, _ = learn(tmp_path / "two", draft_folder)
    _, same = again.served("a")
    assert state is not None
    assert same is not None
    assert all(torch.equal(state[name], same[name]) for name in state)


def test_what_benches_have_learnt_to_vary_leaves_the_keys_of_published_results() -> None:
    """A new key for an old run would have it made again, in hours."""
    assert synthetic_of("4:32").facts() == {}
    assert synthetic_of("8:128:256").facts() == {"capacity_mb": 256}
    assert "rate_hold_steps" not in trainer_facts()["distiller"]
    more = synthetic_of("12:160:256:held_out_fraction=0.2:rate_hold_steps=2500:min_gain=0.002")
    assert more == Synthetic(12.0, 160, 256, 0.2, 2500, min_gain=0.002)
    assert more.facts() == {
        "capacity_mb": 256,
        "held_out_fraction": 0.2,
        "rate_hold_steps": 2500,
        "min_gain": 0.002,
    }
    assert more.of(Learning()).held_out_fraction == 0.2
    for wrong in ("4", "4:32:many", "4:32:rate=3"):
        with pytest.raises(ValueError, match=r"."):
            synthetic_of(wrong)


def test_every_published_result_is_found_by_todays_settings() -> None:
    """The trainer's settings are part of a unit's key, the defaults of today with them."""
    paths = [p for p in PUBLISHED.glob("*.json.gz") if p.name.startswith(("stream", "ceiling"))]
    assert len(paths) == 8
    for path in paths:
        settings = json.loads(gzip.decompress(path.read_bytes()))["settings"]
        assert settings["trainer"] == json.loads(json.dumps(trainer_facts()))
