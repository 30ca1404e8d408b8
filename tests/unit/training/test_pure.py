"""Gate, schedule and batches."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from replay_samples import make_record
from scipy import stats

from paceline.actors.training.batches import fit, make_batch, usable
from paceline.actors.training.expert_evaluation import acceptance
from paceline.actors.training.gate import NOT_FINITE, GateSettings, decide
from paceline.actors.training.topic_schedule import (
    ScheduleSettings,
    TopicView,
    TrafficMeter,
    is_ready,
    select_topic,
    topic_priorities,
)
from paceline.actors.weights.draft_outcomes import student_quantile


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def view(name: str, **changes: object) -> TopicView:
    base = TopicView(name, 100, 20, new_records=50, traffic=10.0)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_gate_publishes_a_clear_gain() -> None:
    served = rng().uniform(0.0, 0.3, 20)
    decision = decide(served + 0.2, served)
    assert decision.publish
    assert decision.facts()["records"] == 20
    # all records agree, and still some spread is assumed
    assert 0.15 < decision.gain_lower_bound < 0.2


def test_gate_rejects_equal_worse_and_noise() -> None:
    served = rng().uniform(0.0, 1.0, 30)
    noise = np.random.default_rng(5).normal(0.0, 0.2, 30)
    assert not decide(served, served).publish
    assert not decide(served - 0.01, served).publish
    assert not decide(served + noise - noise.mean(), served).publish


def test_gate_wants_a_handful_of_records() -> None:
    decision = decide(np.ones(3), np.zeros(3))
    assert not decision.publish
    assert decision.reason == "too few held-out records"
    assert decision.facts()["gain_lower_bound"] is None
    assert decide(np.ones(4), np.zeros(4)).publish
    empty = decide(np.ones(0), np.ones(0), GateSettings(min_records=0))
    assert not empty.publish
    assert empty.facts()["served_expected_acceptance"] is None


def test_gate_refuses_scores_that_do_not_pair_up() -> None:
    with pytest.raises(ValueError, match="pair up"):
        decide(np.ones(5), np.ones(6))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_gate_rejects_a_candidate_without_a_score(broken: float) -> None:
    decision = decide(np.array([1.0, 1.0, 1.0, 1.0, broken]), np.zeros(5))
    assert not decision.publish
    assert decision.reason == NOT_FINITE
    assert json.loads(json.dumps(decision.facts(), allow_nan=False))["records"] == 5


def test_gate_leaves_out_records_that_the_served_draft_has_no_score_on() -> None:
    served = np.array([0.0, 0.1, np.nan, 0.0, 0.1])
    decision = decide(np.array([0.9, 0.9, np.nan, 0.9, 0.9]), served)
    assert decision.publish
    assert decision.records == 4
    assert decision.candidate == pytest.approx(0.9)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 10, 15, 63, 200])
@pytest.mark.parametrize("error", [0.4, 0.05, 0.025, 0.001])
def test_students_quantile_is_scipys(degrees: int, error: float) -> None:
    assert student_quantile(error, degrees) == pytest.approx(stats.t.isf(error, degrees), rel=1e-7)


def answers(chance: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Acceptance of records: the share of 10 to 48 tokens that fell to the draft."""
    tokens = generator.integers(10, 48, chance.shape)
    return generator.binomial(tokens, np.clip(chance, 0.0, 1.0)) / tokens


@pytest.mark.parametrize("records", [4, 6, 8, 16, 32, 64])
@pytest.mark.parametrize("shift", [(0.0, 0.0), (-0.15, 0.05), (0.15, -0.05)])
def test_an_equal_candidate_hardly_ever_passes(records: int, shift: tuple[float, float]) -> None:
    """Equal on average, with gains skewed to either side: few records pay for many, or gain."""
    generator = np.random.default_rng(records)
    draws, passed = 1_500, 0
    for _ in range(draws):
        chance = generator.beta(2.0, 4.0, records)
        few = generator.random(records) < 0.25
        changed = chance + np.where(few, *shift)
        # what clipping to [0, 1] adds to the mean is taken off, by a large sample's figure
        changed -= _CLIPPED[shift]
        decision = decide(answers(changed, generator), answers(chance, generator))
        passed += decision.publish
    error = 1.0 - GateSettings().confidence
    assert passed <= draws * error + 3 * (draws * error * (1.0 - error)) ** 0.5


def _clipped(shift: tuple[float, float]) -> float:
    generator = np.random.default_rng(9)
    chance = generator.beta(2.0, 4.0, 200_000)
    changed = chance + np.where(generator.random(200_000) < 0.25, *shift)
    return float((np.clip(changed, 0.0, 1.0) - chance).mean())


_CLIPPED = {shift: _clipped(shift) for shift in [(0.0, 0.0), (-0.15, 0.05), (0.15, -0.05)]}


@pytest.mark.parametrize(
    ("gain", "spread", "records"), [(0.2, 0.1, 6), (0.25, 0.15, 6), (0.1, 0.1, 12)]
)
def test_a_real_gain_passes_with_few_records(gain: float, spread: float, records: int) -> None:
    generator = np.random.default_rng(2)
    draws, passed = 1_000, 0
    for _ in range(draws):
        served = generator.beta(1.0, 9.0, records)
        passed += decide(served + generator.normal(gain, spread, records), served).publish
    assert passed > 0.9 * draws


def test_looking_again_does_not_make_a_candidate_better() -> None:
    served = rng().uniform(0.0, 0.3, 12)
    candidate = served + np.tile([-0.02, 0.12], 6)
    bounds = [decide(candidate, served, looks=n).gain_lower_bound for n in (1, 4, 100)]
    assert bounds[0] > bounds[1] > bounds[2]
    assert decide(candidate, served).publish
    assert not decide(candidate, served, looks=100).publish


def test_a_resting_topic_lets_others_have_their_turn() -> None:
    stuck = view("sql", traffic=30.0, resting=True)
    assert select_topic(topic_priorities([stuck, view("code", traffic=1.0)])) == "code"
    assert select_topic(topic_priorities([stuck])) is None


def test_the_schedule_ranks_by_traffic_times_headroom() -> None:
    assert (
        select_topic(topic_priorities([view("sql", traffic=30.0), view("code", traffic=10.0)]))
        == "sql"
    )
    good = view("sql", traffic=30.0, acceptance=0.95)
    assert (
        select_topic(topic_priorities([good, view("code", traffic=10.0, acceptance=0.1)])) == "code"
    )


def test_the_schedule_abandons_no_topic() -> None:
    waiting = view("code", traffic=1.0, waited_s=3_600.0)
    assert select_topic(topic_priorities([view("sql", traffic=30.0), waiting])) == "code"


def test_general_counts_with_its_own_traffic_and_a_little_without_any() -> None:
    def first(general: float, sql: float, waited_s: float = 0.0) -> str | None:
        views = [view("general", traffic=general, waited_s=waited_s), view("sql", traffic=sql)]
        return select_topic(topic_priorities(views))

    assert first(0.0, 1.0) == "sql"
    assert first(3.0, 1.0) == "general"
    assert first(0.0, 0.0) == "general"
    assert first(0.0, 0.0, waited_s=-1.0) == "sql"  # equal but for their waits
    assert first(0.0, 1.0, waited_s=3600.0) == "general"


def test_schedule_waits_for_records() -> None:
    assert select_topic(topic_priorities([view("sql", records_train=3)])) is None
    assert select_topic(topic_priorities([view("sql", records_held_out=3)])) is None
    assert (
        select_topic(topic_priorities([view("sql", records_train=8, records_held_out=4)])) == "sql"
    )
    assert select_topic(topic_priorities([])) is None


def test_a_published_topic_goes_on_and_a_rejected_one_wants_new_records() -> None:
    settings = ScheduleSettings(rest_growth=0.25)
    assert is_ready(view("sql", new_records=0), settings)
    assert not is_ready(view("sql", new_records=0, rejections=1), settings)
    assert is_ready(view("sql", new_records=4, rejections=1), settings)
    assert not is_ready(view("sql", new_records=24, rejections=3, fruitless=3), settings)
    assert is_ready(view("sql", new_records=25, rejections=3, fruitless=3), settings)
    assert is_ready(view("sql", new_records=4, rejections=30, fruitless=2), settings)  # it may gain


def test_traffic_meter_forgets_and_survives_restarted_counters() -> None:
    meter = TrafficMeter(half_life_s=10.0)
    meter.update({"math": 900, "sql": 0}, 0.0)
    assert meter.level("math") == 0.0  # long ago, for all that is known
    meter.update({"math": 940, "sql": 0}, 0.0)
    meter.update({"math": 940, "sql": 15}, 20.0)
    assert meter.level("math") == pytest.approx(10.0)
    assert meter.level("sql") == pytest.approx(15.0)
    meter.update({"math": 940, "sql": 2}, 20.0)  # the shard of sql was killed
    assert meter.level("sql") == pytest.approx(17.0)
    assert meter.level("poems") == 0.0


def test_batch_has_every_emitted_position_behind_its_context() -> None:
    first = make_record(prompt=(5, 6, 7), length=4, seed=1)
    second = make_record(prompt=(9,), length=2, seed=2)
    batch = make_batch([first, second], max_length=32)
    assert batch.input_ids[:, :6].tolist() == [
        [5, 6, 7, *first.output_token_ids[:-1].tolist()],
        [9, int(second.output_token_ids[0]), 0, 0, 0, 0],
    ]
    assert not batch.input_ids[:, 6:].any()
    assert batch.rows.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.columns.tolist() == [2, 3, 4, 5, 0, 1]
    assert batch.output_ids.tolist() == [
        *first.output_token_ids.tolist(),
        *second.output_token_ids.tolist(),
    ]
    assert batch.num_records == 2
    assert batch.num_positions == 6


def test_long_prompts_lose_their_beginning_only() -> None:
    record = make_record(prompt=tuple(range(1, 101)), length=5)
    batch = make_batch([record], max_length=16)
    assert batch.input_ids.shape == (1, 16)
    assert batch.input_ids[0, :12].tolist() == list(range(89, 101))
    assert batch.columns.tolist() == [11, 12, 13, 14, 15]


def test_batches_of_all_lengths_have_few_widths() -> None:
    """What prepares a product for each shape would else keep something for every one of them."""
    every = [make_record(prompt=tuple(range(size)), length=9) for size in range(1, 90)]
    widths = {make_batch([record], max_length=90).input_ids.shape[1] for record in every}
    assert widths == {32, 64, 90}


def test_surplus_of_recorded_tokens_goes_into_the_tail() -> None:
    wide, narrow = make_record(top=6, seed=3), make_record(top=4, seed=4)
    batch = make_batch([wide, narrow], max_length=32)
    assert batch.top_ids.shape == (10, 4)
    total = batch.top_logprobs.exp().sum(-1) + batch.tail_mass
    torch.testing.assert_close(total, torch.ones(10), atol=5e-3, rtol=0.0)


def test_long_answers_keep_their_first_part_with_labels_in_step() -> None:
    record = make_record(prompt=(5, 6, 7), length=40, temperature=1.0)
    batch = make_batch([record, make_record(length=2, temperature=1.0)], max_length=16)
    kept = 14  # 16 tokens go in: 3 of the prompt, 13 of the answer, which predict 14
    answer = record.output_token_ids
    assert batch.input_ids[0].tolist() == [5, 6, 7, *answer[: kept - 1].tolist()]
    assert batch.columns[:kept].tolist() == list(range(2, 16))
    assert batch.output_ids[:kept].tolist() == answer[:kept].tolist()
    assert batch.rows.tolist() == [0] * kept + [1, 1]
    assert batch.top_ids[:kept].tolist() == record.target_top_ids[:kept].tolist()
    assert record.processed_top_probs is not None
    np.testing.assert_array_equal(
        batch.processed_probs[:kept].numpy(), record.processed_top_probs[:kept]
    )
    assert len(batch.tail_mass) == len(batch.temperature) == len(batch.top_logprobs) == kept + 2


def test_a_long_prompt_and_a_long_answer_get_half_of_the_length_each() -> None:
    assert fit(3, 5, 16) == (3, 5)
    assert fit(100, 5, 16) == (12, 5)
    assert fit(3, 40, 16) == (3, 14)
    assert fit(100, 40, 16) == (9, 8)
    assert fit(1, 40, 1) == (1, 1)
    for prompt in range(1, 12):
        for outputs in range(1, 12):
            kept = fit(prompt, outputs, 6)
            assert min(kept) >= 1
            assert sum(kept) - 1 <= 6


def test_unusable_records_are_recognised() -> None:
    assert usable(make_record(), 300)
    assert usable(make_record(length=40), 300)
    assert not usable(make_record(length=0), 300)
    assert not usable(make_record(prompt=()), 300)
    assert not usable(make_record(), 20)


def test_acceptance_is_agreement_for_greedy_and_overlap_for_sampled_positions() -> None:
    greedy = make_record(length=3, seed=1)
    sampled = make_record(length=2, seed=2, temperature=1.0)
    batch = make_batch([greedy, sampled], max_length=32)
    logits = torch.full((5, 300), -40.0)
    # the draft says exactly what was recorded
    logits.scatter_(1, batch.top_ids, batch.top_logprobs)
    values = acceptance(logits, batch, draft_top_k=64)
    assert values[:3].tolist() == [1.0, 1.0, 1.0]
    recorded = batch.processed_probs[3:].sum(-1)
    torch.testing.assert_close(values[3:], recorded, atol=2e-3, rtol=0.0)
    # cut to one token, the draft puts everything on it
    one = acceptance(logits, batch, draft_top_k=1)
    torch.testing.assert_close(one[3:], batch.processed_probs[3:, 0])
