"""The goodput policy in a simulated world: known acceptance, known costs, no clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.speculation.costs import (
    DraftCosts,
    DraftPrefill,
    PrefillCosts,
    StepCosts,
    grid_points,
    profile,
)
from paceline.actors.speculation.goodput import AcceptanceEstimate, DraftGroup, GoodputPolicy

MAX = 8
A, B = DraftGroup("a"), DraftGroup("b")
ROWS = (1, 2, 4, 8, 16)


def target_s(rows: int, tokens: int) -> float:
    """A target whose forward costs 10 ms, and a little more for every token."""
    return 0.010 + 0.0003 * rows * tokens


def draft_s(rows: int, experts: int) -> float:
    return 0.0008 * experts + 0.00005 * rows


def costs(seconds: Callable[[int, int], float], columns: tuple[int, ...]) -> StepCosts:
    return StepCosts({(r, c): seconds(r, c) for r in ROWS for c in columns})


def draft_costs(
    seconds: Callable[[int, int], float] = draft_s, prefill: PrefillCosts | None = None
) -> DraftCosts:
    return DraftCosts({(r, e): seconds(r, e) for r in ROWS for e in (1, 2, 4)}, prefill)


def make_policy() -> GoodputPolicy:
    return GoodputPolicy(costs(target_s, (1, 2, 5, 9)), draft_costs(), MAX)


def test_a_request_s_own_number_of_tokens_may_be_beyond_the_largest_k() -> None:
    policy = make_policy()
    assert policy.expected_accepted(A, 3 * MAX) == policy.expected_accepted(A, MAX)
    assert policy.round_seconds(2, 1, {A: 1}, 3 * MAX) == policy.round_seconds(2, 1, {A: 1}, MAX)


class World:
    """Rounds of a fixed batch; every drafted token of an expert is accepted alike.

    ``noise`` is the deviation of the logarithm of what the policy sees a round take.
    """

    def __init__(
        self,
        rows: dict[DraftGroup, int],
        acceptance: dict[DraftGroup, float],
        seed: int = 0,
        *,
        target: Callable[[int, int], float] = target_s,
        draft: Callable[[int, int], float] = draft_s,
        noise: float = 0.0,
    ) -> None:
        self.rows, self.acceptance = rows, acceptance
        self.random = random.Random(seed)
        self.target, self.draft, self.noise = target, draft, noise
        self.policy = GoodputPolicy(costs(target, (1, 2, 5, 9)), draft_costs(draft), MAX)
        self.seconds = self.plain_seconds = 0.0
        self.tokens = 0
        self.same_plain_s = 0.0  # that plain decoding would have taken for these tokens
        self.slowness = 1.0
        self.silent = 0  # rounds in which drafts read their prompts instead of drafting
        self.fixed_s = 0.0  # of every round that drafts, beside its steps
        self.policy.observe_finished(0, 64)  # prompts of no length to speak of

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round()

    def round(self) -> dict[DraftGroup, int]:
        plan = dict(self.policy.choose(self.rows))
        if self.silent and any(plan.values()):
            self.silent -= 1
            plan = dict.fromkeys(plan, 0)
        batch = sum(self.rows.values())
        drafting = {e: n for e, n in self.rows.items() if plan[e]}
        experts = len({group.draft for group in drafting})
        steps = max(plan.values())
        verify = self.slowness * self.target(batch, steps + 1)
        drafted = self.slowness * (
            self.fixed_s + steps * self.draft(sum(drafting.values()), experts) if drafting else 0.0
        )
        before = self.tokens
        for expert, n in self.rows.items():
            for _ in range(n):
                tries = (
                    self.random.random() < self.acceptance[expert] for _ in range(plan[expert])
                )
                accepted = sum(1 for _ in itertools.takewhile(bool, tries))
                self.policy.observe_acceptance(expert, plan[expert], plan[expert], accepted)
                self.tokens += 1 + accepted
        noisy = [s * self.random.lognormvariate(0.0, self.noise) for s in (verify, drafted)]
        sizes = (sum(drafting.values()), experts, steps)
        self.policy.observe_round(batch, steps + 1, noisy[0], sizes, noisy[1])
        plain = self.slowness * self.target(batch, 1)
        self.seconds += verify + drafted
        self.plain_seconds += plain
        self.same_plain_s += (self.tokens - before) / batch * plain
        return plan


def test_the_rest_of_an_answer_must_be_worth_the_prefill() -> None:
    """Steps alone promise a gain of a third; the prefill costs more than that."""

    def settled(unread: int, left: int) -> list[int]:
        drafting_costs = draft_costs(prefill=PrefillCosts(0.0, 0.0005))
        policy = GoodputPolicy(costs(target_s, (1, 2, 5, 9)), drafting_costs, MAX)
        draws, chosen = random.Random(2), []
        for _ in range(60):
            policy.observe_round(1, 1, target_s(1, 1), (0, 0, 0), 0.05, DraftPrefill(1, 100))
            policy.observe_finished(30, 300)
        for _ in range(400):
            k = policy.choose(
                {A: 1}, 0, lambda: {A: policy.prefill_costs.seconds(1, unread) / left}
            )[A]
            tries = (draws.random() < 0.8 for _ in range(k))
            policy.observe_acceptance(A, k, k, sum(1 for _ in itertools.takewhile(bool, tries)))
            drafting = (1, 1, k) if k else (0, 0, 0)
            policy.observe_round(1, k + 1, target_s(1, k + 1), drafting, k * draft_s(1, 1))
            chosen.append(k)
        return chosen[200:]

    assert sorted(settled(unread=30, left=300))[100] >= 3
    assert sorted(settled(unread=0, left=4))[100] >= 3  # it has been read
    assert sum(k > 0 for k in settled(unread=600, left=20)) < 20


def test_expected_remaining_tokens_follow_the_limit_and_the_usual_length() -> None:
    policy = make_policy()
    for _ in range(200):
        policy.observe_finished(40, 100)
    assert policy.prefill_costs.expected_remaining(0, 1000) == pytest.approx(100, rel=0.1)
    assert policy.prefill_costs.expected_remaining(30, 48) == pytest.approx(18)
    assert policy.prefill_costs.expected_remaining(48, 48) == 1
    assert policy.prefill_costs.expected_remaining(500, 1000) == pytest.approx(
        25, rel=0.1
    )  # it has outlived the usual


def test_nothing_is_drafted_if_drafting_and_plain_decoding_are_even() -> None:
    def even(_rows: int, tokens: int) -> float:
        return 0.010 * (1.0 + 0.55 * (tokens - 1))

    world = World({A: 4}, {A: 0.6})
    world.policy = GoodputPolicy(costs(even, (1, 2, 5, 9)), draft_costs(lambda _r, _e: 1e-5), MAX)
    world.policy.observe_finished(0, 64)
    chosen = []
    for _ in range(600):
        k = world.policy.choose({A: 4})[A]
        for _ in range(4):
            tries = (world.random.random() < 0.6 for _ in range(k))
            world.policy.observe_acceptance(
                A, k, k, sum(1 for _ in itertools.takewhile(bool, tries))
            )
        world.policy.observe_round(
            4, k + 1, even(4, k + 1), (4, 1, k) if k else (0, 0, 0), k * 1e-5
        )
        chosen.append(k)
    assert sum(k > 0 for k in chosen[100:]) < 50


@given(
    acceptance=st.floats(0.01, 0.99),
    k=st.integers(0, MAX),
)
def test_constant_acceptance_gives_the_closed_form(acceptance: float, k: int) -> None:
    """(1 - a^{k+1}) / (1 - a) tokens a round, the bonus included (Leviathan et al., eq. 1)."""
    estimate = AcceptanceEstimate(MAX)
    estimate.trials = [1e9] * MAX
    estimate.hits = [1e9 * acceptance] * MAX
    expected = (1 - acceptance ** (k + 1)) / (1 - acceptance)
    assert 1 + estimate.expected_accepted()[k] == pytest.approx(expected, rel=1e-5)


def test_acceptance_counts_tried_positions_only() -> None:
    estimate = AcceptanceEstimate(4)
    estimate.observe(limit=4, drafted=4, accepted=1)
    assert estimate.trials == [1, 1, 0, 0]
    assert estimate.hits == [1, 0, 0, 0]
    estimate.observe(limit=2, drafted=2, accepted=2)
    assert [round(t, 2) for t in estimate.trials] == [2, 2, 0, 0]


def test_a_draft_that_ends_early_was_not_accepted_where_it_could_have_been() -> None:
    estimate = AcceptanceEstimate(4)
    for _ in range(4000):
        estimate.observe(limit=3, drafted=1, accepted=1)
        estimate.observe(limit=3, drafted=3, accepted=2)
    assert estimate.expected_accepted()[3] == pytest.approx(1.5, abs=0.05)
    assert estimate.drafts_at_least()[:4] == pytest.approx([1, 1, 0.5, 0.5], abs=0.02)


def test_drafts_that_end_where_they_are_unsure_may_be_long() -> None:
    """One round in ten is easy: a long limit pays only if the others end early."""

    def settled(*, early: bool) -> list[int]:
        policy, draws, chosen = make_policy(), random.Random(3), []
        policy.observe_finished(0, 64)
        for _ in range(800):
            k = policy.choose({A: 1})[A]
            easy = draws.random() < 0.1
            drafted = k if easy or not early else min(k, 1)
            policy.observe_acceptance(A, k, drafted, k if easy else 0)
            drafting = (1, 1, drafted) if drafted else (0, 0, 0)
            verify_s = target_s(1, drafted + 1)
            policy.observe_round(1, drafted + 1, verify_s, drafting, drafted * draft_s(1, 1))
            chosen.append(k)
        return sorted(chosen[400:])

    assert settled(early=True)[200] >= settled(early=False)[200] + 2


def test_the_least_reach_is_what_a_further_token_costs() -> None:
    policy = make_policy()
    policy.observe_finished(0, 64)
    for _ in range(300):
        policy.observe_acceptance(A, MAX, MAX, MAX)
    k = policy.choose({A: 1})[A]
    further_s = (target_s(1, k + 1) - target_s(1, 2)) / (k - 1) + draft_s(1, 1)
    assert policy.predicted_goodput is not None
    assert policy.early_end(A).min_reach == pytest.approx(
        further_s * policy.predicted_goodput, rel=0.1
    )


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_hopeless_drafts_are_off_and_cost_almost_nothing(batch: int) -> None:
    world = World({A: batch}, {A: 0.02})
    world.run(200)  # learning that they are hopeless costs once
    world.seconds = world.plain_seconds = 0.0
    chosen = [world.round()[A] for _ in range(3000)]
    assert 0 < sum(k > 0 for k in chosen) < 300  # it still looks
    assert world.seconds < 1.015 * world.plain_seconds


def test_good_drafts_run_long_and_pay() -> None:
    world = World({A: 1}, {A: 0.9})
    world.run(300)
    assert max(world.round()[A] for _ in range(3)) >= 6
    assert world.tokens / world.seconds > 2.5 * 300 / world.plain_seconds


@pytest.mark.parametrize("acceptance", [0.05, 0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_the_choice_is_near_the_best_fixed_number(acceptance: float, batch: int) -> None:
    world = World({A: batch}, {A: acceptance}, seed=3)
    world.run(300)
    world.seconds = world.tokens = 0
    world.run(3000)

    def fixed(k: int) -> float:
        tokens = batch * sum(acceptance**i for i in range(k + 1))
        return tokens / (target_s(batch, k + 1) + k * draft_s(batch, 1))

    best = max(fixed(k) for k in range(MAX + 1))
    assert world.tokens / world.seconds > 0.95 * best


@pytest.mark.parametrize("batch", [1, 4])
def test_the_fixed_cost_of_a_round_is_not_charged_to_further_steps(batch: int) -> None:
    """Else long drafts look dear for ever after short ones, and are never tried."""
    world = World({A: batch}, {A: 0.5}, seed=5)
    world.fixed_s = 0.004
    world.run(400)
    world.acceptance[A] = 0.85
    world.run(1500)
    world.seconds = world.tokens = 0
    world.run(2000)

    def fixed(k: int) -> float:
        tokens = batch * sum(0.85**i for i in range(k + 1))
        drafting = world.fixed_s + k * draft_s(batch, 1) if k else 0.0
        return tokens / (target_s(batch, k + 1) + drafting)

    assert world.tokens / world.seconds > 0.95 * max(fixed(k) for k in range(MAX + 1))


def test_the_cost_of_untried_steps_follows_from_tried_ones() -> None:
    table = draft_costs()
    step = draft_s(4, 1)
    for _ in range(100):
        table.observe(4, 1, 1, 0.003 + step)
    assert table.seconds(4, 1, 1) == pytest.approx(0.003 + step, rel=0.02)
    assert table.seconds(4, 1, 6) == pytest.approx(0.003 + 6 * step, rel=0.02)
    assert table.seconds(4, 1, 0) == 0.0
    for _ in range(100):  # steps that cost twice what the profile says
        table.observe(4, 1, 5, 0.003 + 10 * step)
    assert table.seconds(4, 1, 8) == pytest.approx(0.003 + 16 * step, rel=0.1)
    table.observe(4, 1, 5, 1e3)
    assert table.seconds(4, 1, 8) < 2 * (0.003 + 16 * step)


@given(
    rounds=st.lists(
        st.tuples(st.integers(1, 16), st.integers(1, 4), st.integers(1, 8), st.floats(0.0, 1.0)),
        max_size=60,
    )
)
def test_the_cost_of_drafting_stays_positive(
    rounds: list[tuple[int, int, int, float]],
) -> None:
    table = draft_costs()
    for rows, experts, steps, seconds in rounds:
        table.observe(rows, experts, steps, seconds)
    for rows in ROWS:
        for k in range(1, MAX + 1):
            assert table.seconds(rows, 1, k) >= 0.0
        assert table._fit.fixed >= 0.0
        assert table._fit.slope > 0.0


def test_acceptance_is_measured_per_expert() -> None:
    good, bad = DraftGroup("good"), DraftGroup("bad")
    world = World({good: 2, bad: 2}, {good: 0.85, bad: 0.02})
    world.run(400)
    chosen = [world.round() for _ in range(200)]
    assert sum(p[good] > 0 for p in chosen) >= 198
    assert sum(p[bad] == 0 for p in chosen) > 150


def test_acceptance_of_sampled_requests_is_measured_apart_from_greedy_ones() -> None:
    """Each alone gets the same k as if the other had never run."""
    greedy, sampled = DraftGroup("a"), DraftGroup("a", sampled=True)

    def late(
        rows: dict[DraftGroup, int], before: dict[DraftGroup, int]
    ) -> list[dict[DraftGroup, int]]:
        world = World(before, {greedy: 0.9, sampled: 0.05})
        world.run(1000)
        world.rows = rows
        world.run(200)
        return [world.round() for _ in range(400)]

    after = late({sampled: 1}, {greedy: 1})
    assert sum(p[sampled] > 0 for p in after) < 60
    assert sorted(p[greedy] for p in late({greedy: 1}, {sampled: 1}))[200] >= 6
    beside = late({greedy: 2, sampled: 2}, {sampled: 1})
    assert sum(p[greedy] > 0 for p in beside) > 390


def test_a_new_group_starts_from_its_counterpart_with_little_weight() -> None:
    policy = make_policy()
    for _ in range(400):
        policy.observe_acceptance(A, MAX, MAX, MAX)
    begun = policy._estimate(A.counterpart)
    known = policy._estimate(A).expected_accepted()[1]
    assert 0.6 < begun.expected_accepted()[1] < known
    for _ in range(30):
        policy.observe_acceptance(A.counterpart, MAX, MAX, 0)
    assert begun.expected_accepted()[1] < 0.5
    assert policy._estimate(A).expected_accepted()[1] == known


def test_a_group_at_the_maximum_does_not_keep_others_from_being_probed() -> None:
    """A row costs a draft step so much that the sampled group, seldom accepted, is off."""
    greedy, sampled = DraftGroup("a"), DraftGroup("a", sampled=True)

    def dear(rows: int, experts: int) -> float:
        return 0.0008 * experts + 0.001 * rows

    def rows_of(k: Mapping[DraftGroup, int]) -> int:
        return sum(n for group, n in world.rows.items() if k[group])

    world = World({greedy: 2, sampled: 1}, {greedy: 0.97, sampled: 0.02})
    policy = GoodputPolicy(costs(target_s, (1, 2, 5, 9)), draft_costs(dear), MAX)
    policy.set_limits(4)
    chosen = []
    for _ in range(4000):
        k = policy.choose(world.rows)
        chosen.append(k)
        for group, n in world.rows.items():
            for _ in range(n):
                tries = (world.random.random() < world.acceptance[group] for _ in range(k[group]))
                policy.observe_acceptance(
                    group, k[group], k[group], sum(1 for _ in itertools.takewhile(bool, tries))
                )
        steps = max(k.values())
        drafting = (rows_of(k), 1, steps) if steps else (0, 0, 0)
        policy.observe_round(
            3, steps + 1, target_s(3, steps + 1), drafting, steps * dear(rows_of(k), 1)
        )
    late = chosen[1000:]
    assert sum(k[greedy] == 4 for k in late) > 0.95 * len(late)
    looked = [n for n, k in enumerate(late) if k[sampled]]
    assert 0 < len(looked) < 0.2 * len(late)
    assert looked[-1] > 0.8 * len(late)  # again and again, not once


def test_one_good_row_beside_many_poor_ones_drafts_alone() -> None:
    greedy, sampled = DraftGroup("a"), DraftGroup("a", sampled=True)
    policy = make_policy()
    for number in range(400):
        policy.observe_acceptance(greedy, MAX, MAX, MAX)
        policy.observe_acceptance(sampled, MAX, MAX, 0 if number % 4 else MAX)
    lengths = [policy._estimate(group).expected_accepted()[1] for group in (greedy, sampled)]
    assert lengths[0] < 16 * lengths[1]  # all of the many together gain more
    made = {plan.groups for plan in policy._candidates({greedy: 1, sampled: 16}, MAX)}
    assert made == {frozenset({greedy}), frozenset({sampled}), frozenset({greedy, sampled})}


def test_a_swap_concerns_all_groups() -> None:
    policy = make_policy()
    for group in DraftGroup.of_draft("a"):
        policy.observe_acceptance(group, MAX, MAX, MAX)
        policy.choose({group: 1})
        policy._probe(group).due = False
    policy.reset_acceptance("a")
    assert all(
        policy._estimate(group).trials[0] < 1 and policy._probe(group).due
        for group in DraftGroup.of_draft("a")
    )


def test_an_expert_with_both_groups_counts_as_one_expert() -> None:
    """Its weights are read once per step."""
    read = []

    class Told(DraftCosts):
        def seconds(self, rows: int, experts: int, steps: int) -> float:
            read.append(experts)
            return super().seconds(rows, experts, steps)

    table = {(r, e): draft_s(r, e) for r in ROWS for e in (1, 2, 4)}
    policy = GoodputPolicy(costs(target_s, (1, 2, 5, 9)), Told(table), MAX)
    policy.choose({A: 2, A.counterpart: 2})
    assert set(read) == {1}
    policy.choose({A: 2, B: 2})
    assert set(read) == {1, 2}
    alike = GoodputPolicy(costs(target_s, (1, 2, 5, 9)), Told(table), MAX, num_models=lambda _: 1)
    read.clear()
    alike.choose({A: 2, B: 2})  # of the same weights
    assert set(read) == {1}


def test_a_costly_probe_comes_more_rarely_but_it_comes() -> None:
    """Of a slow target: four rounds of further tokens cost more than half a second."""
    world = World({A: 8}, {A: 0.02}, target=lambda r, t: 1.0 + 0.01 * r * t, draft=lambda *_: 0.01)
    world.run(1000)
    world.acceptance[A] = 0.9
    assert any(world.round()[A] > 2 for _ in range(3000))


@pytest.mark.parametrize(("factor", "fixed"), [(1.0, 0.004), (1.4, 0.0), (1.2, 0.002)])
def test_one_size_leaves_open_whether_rounds_are_slower_or_take_more_beside_their_forwards(
    factor: float, fixed: float
) -> None:
    """Two tell."""
    table = costs(target_s, (1, 2, 5, 9))
    for _ in range(50):
        table.observe(8, 1, factor * target_s(8, 1) + fixed)
    at_5 = factor * target_s(8, 5) + fixed
    assert table.seconds(8, 5) == pytest.approx(at_5, rel=0.12)
    for _ in range(400):
        table.observe(8, 1, factor * target_s(8, 1) + fixed)
        table.observe(8, 9, factor * target_s(8, 9) + fixed)
    assert table.seconds(8, 5) == pytest.approx(at_5, rel=0.03)


def test_a_better_draft_is_noticed_and_a_swap_is_probed_at_once() -> None:
    world = World({A: 1}, {A: 0.02})
    world.run(1000)
    world.acceptance[A] = 0.9
    assert next(i for i in range(5000) if world.round()[A] > 2) < 5000
    world = World({A: 1}, {A: 0.02})
    world.run(1000)
    world.policy.reset_acceptance("a")
    assert world.round()[A] > 0


def test_a_swap_is_probed_though_the_draft_prefills_first() -> None:
    world = World({A: 1}, {A: 0.02})
    world.run(1000)
    world.acceptance[A], world.silent = 0.9, 20
    world.policy.reset_acceptance("a")
    assert max(world.round()[A] for _ in range(60)) > 2


def test_deeper_positions_are_probed_again() -> None:
    """Acceptance at later positions changes without a swap: k must be able to grow."""
    world = World({A: 1}, {A: 0.45})
    world.run(2000)
    world.acceptance[A] = 0.95
    chosen = [world.round()[A] for _ in range(3000)]
    assert sorted(chosen[-100:])[50] >= 6


def test_a_slow_hour_is_forgotten() -> None:
    """Costs of a busy machine must not make plain decoding look dear on a quiet one."""
    world = World({A: 1}, {A: 0.02})
    world.slowness = 3.0
    world.run(500)
    world.slowness, world.acceptance[A] = 1.0, 0.9
    world.policy.reset_acceptance("a")
    world.run(300)
    world.acceptance[A] = 0.02
    world.run(1500)
    world.seconds = world.plain_seconds = 0.0
    world.run(2000)
    assert world.seconds < 1.03 * world.plain_seconds


@pytest.mark.parametrize("count", [1, 4, 8])
def test_many_hopeless_experts_cost_no_more_than_one(count: int) -> None:
    names = [DraftGroup(f"e{i}") for i in range(count)]
    world = World(dict.fromkeys(names, 1), dict.fromkeys(names, 0.02))
    world.run(1000)
    world.seconds = world.plain_seconds = 0.0
    looked: set[DraftGroup] = set()
    for _ in range(4000):
        looked |= {e for e, k in world.round().items() if k}
    assert looked == set(names)
    assert world.seconds < 1.02 * world.plain_seconds


def test_a_noisy_profile_gives_positive_costs() -> None:
    table = StepCosts({(1, 1): 5.0, (1, 5): 5.4, (1, 9): 4.6})
    assert table.seconds(1, 33) == pytest.approx(4.6)
    for _ in range(40):
        table.observe(1, 33, 9.0)
    assert 1.0 <= table.pace < 1.03  # the size beyond the grid looked dearer for some rounds
    assert table.seconds(1, 9) == pytest.approx(4.6 * table.pace)
    assert table.seconds(1, 33) == pytest.approx(9.0, rel=0.02)


def test_costs_come_from_the_profile_until_they_are_measured() -> None:
    table = costs(target_s, (1, 2, 5, 9))
    assert table.seconds(4, 5) == pytest.approx(target_s(4, 5))
    assert table.seconds(3, 3) == pytest.approx(target_s(3, 3), rel=0.05)
    for _ in range(50):
        table.observe(4, 5, 2 * target_s(4, 5))
    assert table.seconds(4, 5) == pytest.approx(2 * target_s(4, 5), rel=0.05)
    assert table.seconds(8, 9) > 1.5 * target_s(8, 9)  # the machine has become slower
    before = table.seconds(4, 5)
    table.observe(4, 5, 1e3)
    assert table.seconds(4, 5) < 1.3 * before


def test_a_slow_machine_slows_idle_sizes_too() -> None:
    table = costs(target_s, (1, 2, 5, 9))
    plain, drafted = target_s(16, 1), target_s(16, 2)
    for _ in range(60):
        table.observe(16, 1, plain)
        table.observe(16, 2, drafted)
    for _ in range(50):
        table.observe(16, 1, 1.5 * plain)
    assert table.pace == pytest.approx(1.5, rel=0.15)
    assert table.seconds(16, 1) == pytest.approx(1.5 * plain, rel=0.02)
    assert table.seconds(16, 2) == pytest.approx(1.5 * drafted, rel=0.15)
    for _ in range(50):  # plain rounds stop in the slow time, and it ends
        table.observe(16, 2, drafted)
    assert table.seconds(16, 1) == pytest.approx(plain, rel=0.2)  # not 1.5
    for _ in range(400):  # a size that alone costs more comes to be known as such
        table.observe(16, 1, plain)
        table.observe(16, 2, 1.2 * drafted)
    assert table.seconds(16, 2) / table.seconds(16, 1) == pytest.approx(1.2 * drafted / plain, 0.05)


def test_a_stopped_clock_does_not_bring_the_pace_to_nothing() -> None:
    table = costs(target_s, (1, 2, 5, 9))
    for _ in range(30):
        table.observe(16, 1, target_s(16, 1))
    for _ in range(200):
        table.observe(16, 1, 0.0)
    assert table.pace >= 1e-3
    for _ in range(1000):
        table.observe(16, 1, target_s(16, 1))
    assert table.seconds(16, 1) == pytest.approx(target_s(16, 1), rel=0.05)


def test_slow_rounds_do_not_make_a_full_batch_draft_at_a_loss() -> None:
    """A tenth is lost where all draft. Slow moments fall on plain rounds or on drafting ones.

    Costs are those of the small target on a busy machine, 50 ms to half a second slow at a time.
    """

    def target(rows: int, tokens: int) -> float:
        return 0.0032 + 0.00042 * rows + 0.00019 * rows * (tokens - 1)

    def draft(rows: int, _experts: int) -> float:
        return 0.0012 + 0.00015 * rows

    rates = []
    for seed in range(12):
        draws = random.Random(seed)
        world = World({A: 16}, {A: 0.5}, seed, target=target, draft=draft, noise=0.15)
        for number in range(2000):
            if number == 200:
                world.seconds = world.same_plain_s = 0.0
            if world.slowness > 1.0:
                world.slowness = 1.0 if draws.random() < 0.1 else world.slowness
            elif draws.random() < 0.02:
                world.slowness = draws.choice((1.3, 1.6, 2.0))
            world.round()
        rates.append(world.same_plain_s / world.seconds)
    assert sum(rates) / len(rates) > 0.99


def test_profile_takes_the_best_of_several_timings() -> None:
    times = itertools.count()
    table = profile(lambda _r, _c: None, (1, 2), (1,), lambda: float(next(times)), repeats=2)
    assert table == {(1, 1): 1.0, (2, 1): 1.0}
    assert grid_points(1) == [1]
    assert grid_points(6) == [1, 2, 4, 6]


@pytest.mark.parametrize(("enough_s", "turns"), [(0.0, 2), (3.5, 2), (4.5, 3), (math.inf, 4)])
def test_a_profile_ends_after_two_turns_if_they_took_long(enough_s: float, turns: int) -> None:
    calls: list[int] = []
    profile(
        lambda _r, column: calls.append(column),
        (1,),
        (1, 2),
        lambda: float(len(calls)),
        enough_s=enough_s,
    )
    assert len(calls) == 2 * turns


def test_profile_bears_a_slow_moment() -> None:
    """No size looks dear for when it was timed, nor dearer than a larger one."""
    now, calls = 0.0, 0

    def run(rows: int, column: int) -> None:
        nonlocal now, calls
        calls += 1
        slow = calls <= 5  # all timings of the first size, were they one after the other
        now += (rows + column) * (10.0 if slow else 1.0) + (
            3.0 if (rows, column) == (2, 1) else 0.0
        )

    table = profile(run, (1, 2), (1, 4), lambda: now)
    assert table == {(1, 1): 2.0, (1, 4): 5.0, (2, 1): 6.0, (2, 4): 6.0}


def test_k_falls_as_load_grows() -> None:
    """Where a forward costs by the token, a full batch leaves nothing idle to speculate with."""

    def busy(rows: int, tokens: int) -> float:
        return max(0.010, 0.001 * rows * tokens)

    chosen = []
    for batch in (1, 2, 4, 8, 16):
        tables = costs(busy, tuple(range(1, MAX + 2))), draft_costs()
        policy = GoodputPolicy(*tables, MAX)
        for _ in range(300):
            policy.observe_acceptance(A, MAX, MAX, 3)
        for _ in range(10):  # the first probe of an expert that is off ends in these
            k = policy.choose({A: batch})[A]
            policy.observe_acceptance(A, k, k, min(k, 3))
            drafting = (batch, 1, k) if k else (0, 0, 0)
            policy.observe_round(batch, k + 1, busy(batch, k + 1), drafting, k * draft_s(batch, 1))
        chosen.append(k)
    assert chosen[0] >= 3
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] == 0


def test_the_prefill_of_later_requests_counts() -> None:
    """Running requests are computed, but later prefills cost more than drafts gain."""

    def settled(prompt: int) -> int:
        drafting_costs = draft_costs(prefill=PrefillCosts(0.0, 0.0005))
        policy = GoodputPolicy(costs(target_s, (1, 2, 5, 9)), drafting_costs, MAX)
        for _ in range(200):
            policy.observe_finished(prompt, 32)
        for _ in range(300):
            k = policy.choose({A: 4}, 0, lambda: {A: 0.0})[A]
            for _ in range(4):
                policy.observe_acceptance(A, k, k, min(k, 2))
            policy.observe_round(
                4, k + 1, target_s(4, k + 1), (4, 1, k) if k else (0, 0, 0), k * 0.001
            )
        return policy.choose({A: 4})[A]

    assert settled(prompt=8) >= 2
    assert settled(prompt=800) == 0


def test_the_first_time_of_a_size_counts_as_one_time_work() -> None:
    table = costs(target_s, (1, 2, 5, 9))
    usual = table.seconds(4, 3)
    table.observe(4, 3, 20 * usual)
    table.observe(4, 3, usual)
    table.observe(4, 3, usual)
    assert table.seconds(4, 3) == pytest.approx(usual, rel=0.01)


def test_prefill_costs_follow_measurements() -> None:
    prefill = PrefillCosts(request_s=0.001, token_s=0.0001)
    assert prefill.seconds(1, 10) == pytest.approx(0.002)
    prefill.observe(DraftPrefill(1, 10), 0.2)  # a stall
    assert prefill.seconds(1, 10) < 0.0022
    for _ in range(100):
        prefill.observe(DraftPrefill(2, 40), 0.012)  # twice what was profiled
    assert prefill.seconds(1, 10) == pytest.approx(0.004, rel=0.02)


def test_an_expert_without_decoding_rows_is_not_probed() -> None:
    policy = make_policy()
    for _ in range(200):
        chosen = policy.choose({A: 1, B: 3}, prefilling={B: 3})
        policy.observe_acceptance(A, chosen[A], chosen[A], chosen[A])
        drafting = (1, 1, chosen[A]) if chosen[A] else (0, 0, 0)
        policy.observe_round(1, chosen[A] + 1, target_s(1, chosen[A] + 1), drafting, 0.001)
    assert policy._probe(B).due  # its first probe is still to come
    assert policy.choose({A: 1, B: 3})[B] > 0


def test_prefill_costs_stay_positive() -> None:
    prefill = PrefillCosts(request_s=0.001, token_s=0.0)
    for _ in range(500):
        prefill.observe(DraftPrefill(1, 1), -0.001)
    assert prefill.seconds(1, 0) == pytest.approx(0.0001)


def test_limits_hold_from_the_next_round_on_and_can_be_restored() -> None:
    world = World({A: 1}, {A: 0.95})
    world.run(400)
    settled = world.policy.current_k("a")
    assert settled > 3
    world.policy.set_limits(2)
    assert max(max(world.round().values()) for _ in range(300)) == 2
    world.policy.set_limits(0)
    assert max(max(world.round().values()) for _ in range(300)) == 0
    world.policy.set_limits()
    world.run(300)
    assert world.policy.current_k("a") > 3
    world.policy.set_limits(MAX + 5)
    assert max(max(world.round().values()) for _ in range(300)) <= MAX


def test_without_a_probe_share_a_draft_that_does_not_pay_is_not_probed_again() -> None:
    def looks(share: float | None) -> int:
        world = World({A: 8}, {A: 0.02})
        world.run(300)
        world.policy.set_limits(None, share)
        world.policy._probe_budget_s = 0.0
        return sum(any(world.round().values()) for _ in range(4000))

    assert looks(0.0) == 0
    assert looks(0.1) > looks(None) > 0


def test_forced_tokens_are_verified_as_far_as_they_pay() -> None:
    """A token of a row costs 1 ms, a round 4 ms more."""
    costs = {(rows, n): 4e-3 + 1e-3 * rows * n for rows in (1, 16) for n in (1, 32)}
    policy = GoodputPolicy(StepCosts(costs), make_policy()._draft, 8)
    assert policy.verify_tokens(1, 0, [6]) == 6
    assert policy.verify_tokens(16, 0, [6]) == 0  # 15 rows would be padded for nothing
    assert policy.verify_tokens(16, 3, [6]) == 3
    assert policy.verify_tokens(16, 0, [6] * 16) == 6
    assert policy.verify_tokens(1, 2, []) == 2


def ragged_policy() -> GoodputPolicy:
    """A target whose forward costs as all tokens that it verifies."""
    target = costs(lambda rows, column: 0.009 + 0.001 * (rows + column), (1, 2, 5, 9, 33))
    return GoodputPolicy(target, draft_costs(), MAX, ragged=True)


def test_in_a_ragged_round_a_row_pays_for_its_own_tokens_alone() -> None:
    padded, ragged = make_policy(), ragged_policy()
    assert [policy.column([0, 3, 1]) for policy in (padded, ragged)] == [4, 5]
    assert [policy.column([]) for policy in (padded, ragged)] == [1, 1]
    assert ragged.round_seconds(8, 3, {}, 0) == pytest.approx(0.010 + 0.001 * 11)
    group, k = DraftGroup("a"), 2
    for _ in range(400):  # one of two drafted tokens, always
        ragged.observe_acceptance(group, k, 1, 0)
    seconds = ragged.round_seconds(8, 3, {group: 4}, k)
    verified = 0.010 + 0.001 * (8 + 4 + 3)
    assert seconds == pytest.approx(verified + draft_s(4, 1), rel=0.1)


def test_one_row_of_many_drafts_where_verification_is_ragged() -> None:
    """Its tokens are hardly ever rejected: worth a token of time each, but not one of every row."""
    good, poor = DraftGroup("good"), DraftGroup("poor")
    padded_s = costs(lambda rows, column: 0.010 + 0.001 * rows * column, (1, 2, 5, 9))
    padded = GoodputPolicy(padded_s, draft_costs(), MAX)
    found = []
    for policy in (padded, ragged_policy()):
        for _ in range(400):
            policy.observe_acceptance(good, 4, 4, 4)
            policy.observe_acceptance(poor, 4, 4, 0)
        for _ in range(50):
            policy.choose({good: 1, poor: 3})
        found.append((policy.current_k("good"), policy.current_k("poor")))
    assert found[0][1] == found[1][1] == 0
    assert found[1][0] > found[0][0]
