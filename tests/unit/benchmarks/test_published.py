"""The whole proof goes on from what is published: every bench of it takes the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from online import __main__ as learning
from online import grid, medusa, routes, traffic
from replay_samples import make_record

BENCHES = (grid, routes, medusa, traffic, learning)


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.__name__)
def test_every_bench_of_the_proof_takes_the_folder(bench: Any, tmp_path: Path) -> None:
    assert bench.parse(["--quick"]).published is None
    assert bench.parse(["--quick", "--published", str(tmp_path)]).published == tmp_path


class Trained:
    """A trainer that counts its cells."""

    count = 0

    def __init__(self, *_: object) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {}

    def evaluate(self, _: object) -> dict[str, list[float]]:
        return {"greedy": [0.1], "sampled": [0.2]}

    def train(self, *_: object) -> dict[str, Any]:
        Trained.count += 1
        return self.evaluate(None) | {"training_s": 1.0, "positions": 5}


def test_the_grid_goes_on_from_published_cells_of_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "prepare", lambda _: None)  # of a process that trains
    monkeypatch.setattr(grid, "CellTrainer", Trained)
    monkeypatch.setattr(Trained, "count", 0)
    taught = []
    for out, prompt in (("one", (1, 2)), ("two", (1, 2)), ("three", (1, 3))):
        records = (make_record(prompt=prompt),)
        monkeypatch.setattr(grid, "logged_replay", lambda *_, r=records: grid.Replay(r, r))
        grid.main(
            ["--quick", "--published", str(tmp_path / "published"), "--out", str(tmp_path / out)]
        )
        taught.append(Trained.count)
    cells = 3 * len(grid.QUICK_CELLS)
    assert taught == [cells, cells, 2 * cells]  # another folder's prompts are others
