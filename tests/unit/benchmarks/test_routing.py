"""The statistics of the routing benchmark, and its runner on a real engine."""

from __future__ import annotations

from pathlib import Path

from decoding import Served
from engines import make_engine
from prompts import Prompt
from routing import hedge_weights
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, training_record


def test_every_request_is_drafted_by_its_own_expert_and_the_text_stays_the_targets() -> None:
    engine = make_engine()
    prompts = [Prompt(n, "sql", (1, 5 + n, 9)) for n in range(6)]
    plain = Served("off", engine, None, lambda _: "off").run(prompts, 2, 0.0, 12)
    drafted = Served("on", engine, None, lambda p: "ab"[p.number % 2]).run(
        prompts, 2, 0.0, 12, store=True
    )
    assert drafted.outputs == plain.outputs
    assert drafted.drafted.rounds > 0
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
