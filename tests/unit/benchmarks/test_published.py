"""The whole proof goes on from what is published: every bench of it takes the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from online import __main__ as learning
from online import grid, medusa, routes, traffic
from online.grid_replay import Replay
from replay_samples import make_record

BENCHES = (grid, routes, medusa, traffic, learning)


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.__name__)
def test_every_bench_of_the_proof_takes_the_folder(bench: Any, tmp_path: Path) -> None:
    assert bench.parse(["--quick"]).published is None
    assert bench.parse(["--quick", "--published", str(tmp_path)]).published == tmp_path


@pytest.mark.parametrize(("name", "main"), [("medusa", medusa.main), ("traffic", traffic.main)])
def test_a_bench_whose_section_is_published_runs_nothing(
    name: str,
    main: Callable[[list[str]], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    published, out = tmp_path / "published", tmp_path / "out"
    published.mkdir()
    section = published / f"{name}.md"
    section.write_text("## A section\n", encoding="utf-8")
    assert main(["--published", str(published), "--out", str(out)]) == 0
    assert section.name in "".join(capsys.readouterr())
    assert not out.exists()


class Taught:
    """A school that counts what it teaches."""

    count = 0

    def __init__(self, *_: object) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {}

    def judge(self, _: object) -> dict[str, list[float]]:
        return {"greedy": [0.1], "sampled": [0.2]}

    def teach(self, *_: object) -> dict[str, Any]:
        Taught.count += 1
        return self.judge(None) | {"training_s": 1.0, "positions": 5}


def test_the_grid_goes_on_from_published_cells_of_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prepare_environment", "forbid_compiling"):  # of a process that trains
        monkeypatch.setattr(grid, name, lambda: None)
    monkeypatch.setattr(grid, "School", Taught)
    monkeypatch.setattr(Taught, "count", 0)
    taught = []
    for out, prompt in (("one", (1, 2)), ("two", (1, 2)), ("three", (1, 3))):
        records = (make_record(prompt=prompt),)
        monkeypatch.setattr(grid, "logged_replay", lambda *_, r=records: Replay(r, r))
        grid.main(
            ["--quick", "--published", str(tmp_path / "published"), "--out", str(tmp_path / out)]
        )
        taught.append(Taught.count)
    cells = 3 * len(grid.QUICK_CELLS)
    assert taught == [cells, cells, 2 * cells]  # another folder's prompts are others
