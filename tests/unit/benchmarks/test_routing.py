"""The statistics of the routing benchmark, and its runner on a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoding import Served
from engines import make_engine
from prompts import Prompt
from routing import hedge_weights, mean_length
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, training_record

from paceline.actors.engine.request import SpeculativeStats


def stats(steps: int, accepted: int) -> SpeculativeStats:
    return SpeculativeStats("sql", 0, steps, 4 * steps, accepted)


def test_the_mean_is_over_rounds_and_its_interval_over_requests() -> None:
    alike = mean_length([stats(10, 20)] * 8)
    assert alike == pytest.approx({"value": 3.0, "low": 3.0, "high": 3.0})
    mixed = mean_length([stats(10, 0), stats(30, 60)] * 4)
    assert mixed["value"] == pytest.approx(2.5)
    assert 1.0 <= mixed["low"] < 2.5 < mixed["high"] <= 3.0
    assert mean_length([SpeculativeStats("", 0)])["value"] is None


def test_every_request_is_drafted_by_its_own_expert_and_the_text_stays_the_targets() -> None:
    engine = make_engine()
    served = Served("", engine, None)
    prompts = [Prompt(n, "sql", (1, 5 + n, 9)) for n in range(6)]
    plain = served.run(prompts, 2, 0.0, 12, ["off"] * 6)
    drafted = served.run(prompts, 2, 0.0, 12, ["a", "b"] * 3, store=True)
    assert drafted.outputs == plain.outputs
    assert [s.draft for s in drafted.stats] == ["a", "b"] * 3
    assert all(s.num_spec_steps > 0 for s in drafted.stats)
    assert sorted(r.expert for r in drafted.records) == ["a"] * 3 + ["b"] * 3
    assert plain.records == []
    assert engine.draft_failures == 0


def test_every_expert_is_scored_on_every_record_of_the_primer(tmp_path: Path) -> None:
    for number, name in enumerate(("general", "sql")):
        tiny_llama(number, vocab=TINY_VOCAB, layers=1).save_pretrained(tmp_path / name)
    drafts = {name: str(tmp_path / name) for name in ("general", "sql")}
    weights, table = hedge_weights(drafts, [training_record(i) for i in range(5)])
    assert table["scores"] == 2 * 5
    assert table["waiting"] == 0
    assert set(weights["sql"]) == {"general", "sql"}
