"""Every recipe run for real, at the smallest scale, and stopped half-way."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from paceline.deploy.recipes import draft, evaluate, router, target
from paceline.deploy.recipes.data import Row, write_rows

TEXTS = {
    "math": ("Ann has {n} plums and gets 3 more. How many?", "{n} + 3 = plums\n#### {n}"),
    "code": ("Write a function that adds {n} to x.", "def add{n}(x):\n    return x + {n}"),
    "sql": ("Show the names of the first {n} boats.", "SELECT name FROM boats LIMIT {n}"),
    "shell": ("How do I use the command `tool{n}`?", "Run a tool.\n\n`tool{n} path/to/file`"),
    "general": ("Tell me {n} things about rain.", "It is wet."),
}


@pytest.fixture(scope="module")
def rows_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for split, start in (("train", 0), ("test", 100)):
        rows = [
            Row(f"{topic}-{i}", topic, prompt.format(n=i), response.format(n=i))
            for topic, (prompt, response) in TEXTS.items()
            for i in range(start, start + 8)
        ]
        write_rows(folder / f"own_{split}.jsonl.gz", rows)
    return folder


def target_arguments(rows: Path, out: Path) -> list[str]:
    numbers = {
        "--adamw-steps": 3, "--muon-steps": 3, "--batch": 2, "--block": 64, "--layers": 2,
        "--width": 64, "--heads": 1, "--context": 256, "--checkpoint-every": 2,
        "--vocab-size": 400,
    }  # fmt: skip
    flags = [str(part) for pair in numbers.items() for part in pair]
    return ["--data", str(rows), "--out", str(out), "--any-source", "--no-stdlib", *flags]


@pytest.fixture(scope="module")
def tiny_target(rows_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("target") / "model"
    assert target.main(target_arguments(rows_folder, out)) == 0
    return out


def assert_equal_weights(one: Path, two: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("stop", ["2", "3", "4"])
def test_a_stopped_target_run_ends_with_the_same_weights(
    rows_folder: Path, tiny_target: Path, tmp_path: Path, stop: str
) -> None:
    arguments = target_arguments(rows_folder, tmp_path / "model")
    assert target.main([*arguments, "--stop-after", stop]) == 0
    assert not (tmp_path / "model").exists()
    assert target.main(arguments) == 0
    assert_equal_weights(tiny_target, tmp_path / "model")


def test_the_target_loads_with_its_tokenizer_and_chat_template(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    assert model.config.vocab_size == len(tokenizer)
    assert model.dtype == torch.bfloat16
    chat = [{"role": "user", "content": "12 boats"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<s><|user|>12 boats<|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["<s>", "<|user|>"]
    assert {"1", "2"} <= set(tokenizer.convert_ids_to_tokens(ids))  # digits are never merged


def test_a_target_is_continued_from_given_weights(
    rows_folder: Path, tiny_target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "more"
    arguments = ["--data", str(rows_folder), "--out", str(out), "--init", str(tiny_target)]
    arguments += ["--any-source", "--no-stdlib", "--muon-steps", "1", "--batch", "1"]
    assert target.main([*arguments, "--block", "64"]) == 0
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 64


def draft_arguments(rows: Path, model: Path, out: Path) -> list[str]:
    numbers = {
        "--per-topic": 6, "--max-new-tokens": 8, "--steps": 4, "--batch": 4, "--width": 64,
        "--checkpoint-every": 2,
    }  # fmt: skip
    flags = [str(part) for pair in numbers.items() for part in pair]
    paths = ["--data", str(rows), "--target", str(model), "--out", str(out)]
    return [*paths, "--any-source", *flags]


def test_a_draft_is_distilled_resumed_and_judged(
    rows_folder: Path, tiny_target: Path, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert draft.main(draft_arguments(rows_folder, tiny_target, whole)) == 0
    arguments = draft_arguments(rows_folder, tiny_target, resumed)
    assert draft.main([*arguments, "--stop-after", "3"]) == 0
    assert not resumed.exists()
    assert draft.main(arguments) == 0
    assert_equal_weights(whole, resumed)

    figures = tmp_path / "figures.json"
    arguments = ["--data", str(rows_folder), "--target", str(tiny_target), "--draft", str(whole)]
    arguments += ["--out", str(figures), "--any-source", "--prompts-per-topic", "3"]
    assert evaluate.main(arguments) == 0
    found = json.loads(figures.read_text())
    assert 0 < found["draft"]["sql"]["expected_acceptance"] < 1
    assert found["draft"]["step_cost_ratio"] > 0
    assert found["target"]["math"]["loss"] > 0
    assert found["target"]["math"]["endless"] <= found["target"]["math"]["either"] <= 1


def test_the_router_is_trained_resumed_and_calibrated(
    rows_folder: Path, tiny_target: Path, tmp_path: Path
) -> None:
    def arguments(out: Path) -> list[str]:
        numbers = {"--per-topic": 12, "--steps": 4, "--batch": 4, "--width": 32, "--layers": 1}
        flags = [str(part) for pair in numbers.items() for part in pair]
        paths = ["--data", str(rows_folder), "--tokenizer", str(tiny_target), "--out", str(out)]
        return [*paths, "--any-source", *flags]

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert router.main(arguments(whole)) == 0
    assert router.main([*arguments(resumed), "--stop-after", "2"]) == 0
    assert not resumed.exists()
    assert router.main(arguments(resumed)) == 0
    assert_equal_weights(whole, resumed)
    model = AutoModelForSequenceClassification.from_pretrained(whole)
    assert set(model.config.id2label.values()) == set(TEXTS)
    assert 0.5 <= model.config.min_confidence <= 0.99

    figures = tmp_path / "figures.json"
    paths = ["--data", str(rows_folder), "--target", str(tiny_target), "--router", str(whole)]
    assert evaluate.main([*paths, "--any-source", "--skip-target", "--out", str(figures)]) == 0
    assert json.loads(figures.read_text())["router"]["held_out"]["prompts"] == 5 * 8


def test_no_checkpoint_is_a_pickle(rows_folder: Path, tiny_target: Path) -> None:
    del rows_folder
    checkpoint = tiny_target.with_name(tiny_target.name + ".checkpoint")
    assert {path.suffix for path in checkpoint.iterdir()} == {".safetensors", ".json"}
    shutil.rmtree(checkpoint)
