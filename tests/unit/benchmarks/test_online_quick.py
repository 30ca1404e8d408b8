"""A quick run is short, and its drafts learn all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import prompts
import pytest
from online.lab import QUICK, Lab, lab_arguments
from online.learner import Learner, Learning
from online.streams import ORDER
from tiny_models import tiny_llama
from training_records import training_record

from paceline.deploy.config.learning_settings import replay_settings


@pytest.mark.usefixtures("deepspeed")
def test_every_expert_of_a_quick_shift_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick run's own prompts and rounds, a tiny draft, and made-up answers."""
    monkeypatch.setattr(prompts, "_GENERATED", 400)  # it uses the first 32
    line = ["--quick", "--target", "small", "--out", str(tmp_path)]
    lab = Lab(lab_arguments("A lab.").parse_args(line), QUICK)
    lab.draft = tmp_path / "draft"
    tiny_llama(2, vocab=len(lab.tokenizer), layers=1).save_pretrained(lab.draft)
    learning, replay = Learning(micro_steps=1, rests=False), replay_settings(lab.config)
    settings = lab.trainer(ORDER)
    settings = replace(settings, distiller=replace(settings.distiller, target_path=None))
    learner = Learner(tmp_path / "weights", settings, learning, replay=replay)
    done = 0
    for topic in ORDER:
        for number, prompt in enumerate(lab.stream(topic, lab.sizes.phase)):
            ids = np.array(prompt.token_ids, dtype=np.int32)
            named = {"request_id": prompt.key, "topic": topic, "prompt_token_ids": ids}
            learner.add(replace(training_record(number), **named))  # type: ignore[arg-type]
        before, done = done, learner.facts()["micro_steps"]
        assert done > before, topic
