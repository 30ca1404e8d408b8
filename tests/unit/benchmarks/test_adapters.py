"""What the benchmark of adapters takes for the same run."""

from __future__ import annotations

import pytest
from adapters import folder_of, parse


@pytest.mark.parametrize(
    "changed",
    [
        ["--seed", "1"],
        ["--max-tokens", "95"],
        ["--learning-rate", "0.001"],
        ["--dtype", "float32"],
        ["--topics", "sql"],
        ["--steps", "299"],
        ["--answers", "399"],
        ["--data", "elsewhere"],
    ],
)
def test_no_option_that_decides_a_figure_finds_results_of_another(changed: list[str]) -> None:
    assert folder_of(parse(changed)) != folder_of(parse([]))
    assert folder_of(parse(["--variants", "full", "--only", "full"])) == folder_of(parse([]))
