"""What rounds in a row leave behind, in any order of outcomes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.training.round_counts import RoundCounts

OUTCOMES = ("hopeless", "hopeful", "published", "withdrawn", "outgrown", "promoted")


@given(st.lists(st.sampled_from(OUTCOMES), max_size=30))
def test_counts_are_of_rounds_in_a_row_and_rollbacks_of_one_stable_version(
    outcomes: list[str],
) -> None:
    counts, stable = RoundCounts(), 0
    for outcome in outcomes:
        before = counts
        match outcome:
            case "hopeless" | "hopeful":
                counts = counts.rejected(hopeless=outcome == "hopeless")
                assert counts.rejections == before.rejections + 1
            case "published":
                counts = counts.published()
                assert (counts.rejections, counts.fruitless) == (0, 0)
            case "withdrawn":
                counts = counts.withdrawn()
                assert counts.fruitless == counts.rejections == before.rolled_back + 1
            case "outgrown":
                counts = counts.outgrown()
            case "promoted":
                stable += 1
                counts = counts.beside(stable)
                assert counts.rolled_back == 0
                assert counts.rejections == before.rejections
        assert 0 <= counts.fruitless <= counts.rejections
        assert counts.beside(stable) == counts
    since = outcomes[::-1]
    since = since[: since.index("promoted")] if "promoted" in since else since
    assert counts.rolled_back == since.count("withdrawn")


def test_hope_does_not_forget_rollbacks() -> None:
    counts = RoundCounts().withdrawn().withdrawn().rejected(hopeless=True)
    assert counts.fruitless == 3
    assert counts.rejected(hopeless=False).fruitless == 2
    assert counts.beside(1).rejected(hopeless=False).fruitless == 0
