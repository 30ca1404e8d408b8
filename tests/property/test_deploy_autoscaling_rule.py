"""The number of replicas: monotone in the load, bounded, and at rest where the load is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.autoscaling import wanted_replicas

LOADS = st.lists(st.floats(0.0, 8.0), max_size=6)
OCCUPANCY = st.floats(0.05, 1.0)
BOUNDS = st.tuples(st.integers(1, 4), st.integers(0, 12)).map(lambda b: (b[0], b[0] + b[1]))
PRESENT = st.integers(1, 20)


@given(loads=LOADS, present=PRESENT, occupancy=OCCUPANCY, bounds=BOUNDS)
def test_it_is_within_the_bounds(
    loads: list[float], present: int, occupancy: float, bounds: tuple[int, int]
) -> None:
    least, most = bounds
    wanted = wanted_replicas(loads, present, occupancy=occupancy, least=least, most=most)
    assert least <= wanted <= most


@given(loads=LOADS, more=st.floats(0.0, 8.0), present=PRESENT, occupancy=OCCUPANCY, bounds=BOUNDS)
def test_more_load_never_wants_fewer(
    loads: list[float], more: float, present: int, occupancy: float, bounds: tuple[int, int]
) -> None:
    least, most = bounds

    def wanted(loads: list[float]) -> int:
        return wanted_replicas(loads, present, occupancy=occupancy, least=least, most=most)

    assert wanted([*loads, more]) >= wanted(loads)


@given(load=st.floats(0.0, 20.0), present=PRESENT, occupancy=OCCUPANCY, bounds=BOUNDS)
def test_a_load_that_stays_wants_the_same_again(
    load: float, present: int, occupancy: float, bounds: tuple[int, int]
) -> None:
    """However it is spread: what goes by no replica is wanted back at once, nor the reverse."""
    least, most = bounds
    first = wanted_replicas([load], present, occupancy=occupancy, least=least, most=most)
    again = wanted_replicas([load / 2] * 2, first, occupancy=occupancy, least=least, most=most)
    assert again == first


@given(load=st.floats(0.1, 20.0), present=PRESENT, occupancy=OCCUPANCY)
def test_where_one_has_gone_a_load_a_fifth_larger_does_not_want_it_back(
    load: float, present: int, occupancy: float
) -> None:
    after = wanted_replicas([load], present, occupancy=occupancy, least=1, most=1000)
    if after < present:
        larger = wanted_replicas([1.2 * load], after, occupancy=occupancy, least=1, most=1000)
        assert larger == after


@given(loads=LOADS, present=PRESENT, occupancy=OCCUPANCY, useful=st.integers(0, 8))
def test_none_is_started_that_would_get_nothing_to_do(
    loads: list[float], present: int, occupancy: float, useful: int
) -> None:
    wanted = wanted_replicas(loads, present, occupancy=occupancy, least=1, most=50, useful=useful)
    assert wanted <= max(useful, 1)
