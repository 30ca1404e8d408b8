"""The grid's cells, what its figures say, and that its replay holds what its cells learn from."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Interval, t_interval
from online.grid import (
    ADAPTERS,
    QUICK_CELLS,
    REFERENCE,
    every_cell,
    parse,
    summary,
)
from scipy import stats

from paceline.actors.training.settings import DistillerSettings, ObjectiveSettings


def run(greedy: list[float], sampled: list[float]) -> dict[str, Any]:
    scores = {"greedy": greedy, "sampled": sampled}
    return scores | {"training_s": 2.0, "in_time": scores, "mib": {"weights": 1.0}}


def runs(*gains: float) -> list[dict[str, Any]]:
    """Three seeds over three records; a gain per record, a little noise per seed."""
    return [
        run([0.3 + g + n for g in gains], [0.5 + g + n for g in gains])
        for n in (-0.001, 0.0, 0.001)
    ]


def test_every_cell_is_there_once_and_the_reference_is_what_the_product_does() -> None:
    cells = every_cell()
    assert len(set(cells)) == len(cells) == 6 * (2 * 3 + 1)
    assert cells[0] == QUICK_CELLS[0] == REFERENCE
    assert set(QUICK_CELLS) <= set(cells)
    defaults = ObjectiveSettings()
    assert (REFERENCE.loss, REFERENCE.sampling, REFERENCE.weighting) == (
        defaults.loss,
        defaults.sampling,
        defaults.weighting,
    )


def test_an_adapter_is_the_reference_with_few_weights() -> None:
    base = DistillerSettings(weight_decay=0.1)
    assert REFERENCE.settings(base) == base
    own = ADAPTERS[1].settings(base)
    assert (own.adapter, own.lora_rank, own.lora_alpha) == ("lora", 4, 8.0)
    assert (own.weight_decay, own.objective) == (0.1, base.objective)


def test_cells_are_chosen_by_name_beside_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--quick"]).cells == list(QUICK_CELLS)
    assert parse([]).cells == list(every_cell())
    assert parse(["--adapters"]).cells == list(ADAPTERS)
    chosen = parse(["--cells", "jsd-target-uniform", "jsd-target-uniform"]).cells
    assert [cell.name for cell in chosen] == [REFERENCE.name, "jsd-target-uniform"]
    with pytest.raises(SystemExit):
        parse(["--cells", "mse-target-uniform"])
    assert "mse-target-uniform" in capsys.readouterr().err


def test_interval_is_students() -> None:
    values = [0.1, 0.3, 0.2, 0.6]
    found = t_interval(values)
    low, high = stats.t.interval(
        0.95, len(values) - 1, loc=stats.tmean(values), scale=stats.sem(values)
    )
    assert (found.value, found.low, found.high) == pytest.approx((0.3, low, high))
    assert t_interval([0.4]) == Interval(0.4, None, None)


def test_clearly_better_means_by_seeds_and_by_records() -> None:
    before = {"greedy": [0.1, 0.1, 0.1], "sampled": [0.2, 0.2, 0.2]}
    every = {
        "base": runs(0.0, 0.0, 0.0),
        "better": runs(0.1, 0.12, 0.11),
        "worse": runs(-0.1, -0.12, -0.11),
        "by_one_record": runs(0.0, 0.5, 0.0),
        "by_one_seed": [run([0.3] * 3, [0.5] * 3)] * 2 + [run([0.9] * 3, [0.9] * 3)],
    }
    cells = summary(before, every, "base")["cells"]
    verdicts = {name: cell["greedy"]["clearly"] for name, cell in cells.items()}
    assert verdicts == {
        "base": None,
        "better": "better",
        "worse": "worse",
        "by_one_record": None,
        "by_one_seed": None,
    }
    wider = {"by_one_record": "gain_over_records", "by_one_seed": "gain_over_seeds"}
    for name, kind in wider.items():
        assert cells[name]["greedy"]["gain"] == cells[name]["greedy"][kind]
    assert cells["better"]["sampled"]["gain_over_records"]["value"] == pytest.approx(0.11)
    assert cells["better"]["sampled"]["acceptance"]["value"] == pytest.approx(0.61)


def test_a_run_that_was_broken_off_is_compared_over_the_seeds_that_it_has() -> None:
    every = {"base": runs(0.0, 0.0), "other": runs(0.1, 0.1)[:1]}
    cell = summary({"greedy": [0.1], "sampled": [0.1]}, every, "base")["cells"]["other"]
    assert cell["greedy"]["gain_over_seeds"] == {
        "value": pytest.approx(0.1),
        "low": None,
        "high": None,
    }
    assert cell["greedy"]["gain"]["low"] is None
    assert cell["greedy"]["clearly"] is None
