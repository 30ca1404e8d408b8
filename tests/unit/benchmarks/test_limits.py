"""What the processor can do at most, beside what a forward takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import limits
import pytest

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler"
)


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.5), (4, 0.8)])
def test_the_limit_is_whichever_takes_longer(tokens: int, share: float) -> None:
    # weights are read in 0.8 s, a row's context in 0.1; a token takes 0.2 s of products
    row = limits.row_of(2, tokens, 2.0, limits.Needs(0.2, 0.8, 0.1))
    assert row["of_limit"] == pytest.approx(share)
    assert (row["reading_ms"], row["products_ms"]) == pytest.approx((1000.0, 400.0 * tokens))


@needs_compiler
def test_limits_and_forwards_are_measured_in_one_run(tmp_path: Path) -> None:
    limits.main(["--target", "small", "--threads", "1", "--repeats", "1", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "limits.json").read_text(encoding="utf-8"))
    assert found["gflop_per_s"] > 1.0
    assert found["gb_per_s"] > 0.5
    assert len(found["forwards"]) == len(limits.SIZES)
    assert all(row["of_limit"] > 0.0 for row in found["forwards"])
