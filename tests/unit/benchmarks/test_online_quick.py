"""A quick run is short, and teaches all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness import Store
from online.__main__ import QUICK_LEARNING
from online.bench import QUICK, Bench
from online.learner import Learner
from online.serving import Serving
from online.units import ORDER, phases_of
from tiny_models import tiny_llama
from training_records import training_record


@pytest.mark.usefixtures("deepspeed")
def test_every_expert_of_a_quick_shift_is_taught(tmp_path: Path) -> None:
    """The quick run's own prompts and rounds, a tiny draft, and made-up answers."""
    learning = replace(QUICK_LEARNING.tireless(), micro_steps=1)
    bench = Bench(Store(tmp_path / "store"), None, QUICK, Serving())
    draft = tmp_path / "draft"
    tiny_llama(2, vocab=len(bench.tokenizer), layers=1).save_pretrained(draft)
    learner = Learner(tmp_path / "weights", ORDER, learning, lambda *_: None, draft=draft)
    for topic, questions in zip(ORDER, phases_of(bench, "abrupt", ORDER), strict=True):
        for number, question in enumerate(questions):
            prompt = np.array(question.token_ids, dtype=np.int32)
            named = {"request_id": question.key, "topic": topic, "prompt_token_ids": prompt}
            learner.add(replace(training_record(number), **named))  # type: ignore[arg-type]
        assert learner._loop.counted[topic].micro_steps > 0, topic
