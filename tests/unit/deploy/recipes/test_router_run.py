"""The router's recipe run for real, at the smallest scale, and stopped half-way."""

import json
from pathlib import Path

from fixtures.recipes import evaluate_router, router
from recipe_rows import TEXTS, assert_equal_weights, write_own_rows
from tiny_models import tiny_tokenizer
from transformers import AutoModelForSequenceClassification


def test_the_router_is_trained_resumed_and_calibrated(tmp_path: Path) -> None:
    (rows := tmp_path / "rows").mkdir()
    write_own_rows(rows)
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def arguments(out: Path) -> list[str]:
        numbers = {"--per-topic": 12, "--steps": 4, "--batch": 4, "--width": 32, "--layers": 1}
        flags = [str(part) for pair in numbers.items() for part in pair]
        paths = ["--data", str(rows), "--tokenizer", str(tmp_path / "tokenizer"), "--out", str(out)]
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
    paths = ["--data", str(rows), "--router", str(whole), "--out", str(figures)]
    assert evaluate_router.main([*paths, "--any-source"]) == 0
    assert json.loads(figures.read_text())["router"]["held_out"]["prompts"] == 5 * 8
