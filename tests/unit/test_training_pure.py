"""Gate, schedule and batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from replay_samples import make_record

from paceline.actors.training.batches import make_batch, usable
from paceline.actors.training.evaluation import acceptance
from paceline.actors.training.gate import GateSettings, judge
from paceline.actors.training.schedule import (
    ScheduleSettings,
    TopicView,
    TrafficMeter,
    choose,
    is_ready,
)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def view(name: str, **changes: object) -> TopicView:
    base = TopicView(name, 100, 20, new_records=50, traffic=10.0)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_gate_publishes_a_clear_gain() -> None:
    served = rng().uniform(0.0, 0.3, 20)
    decision = judge(served + 0.2, served, rng())
    assert decision.publish
    assert decision.facts()["records"] == 20
    assert decision.gain_lower_bound == pytest.approx(0.2)


def test_gate_rejects_equal_worse_and_noise() -> None:
    served = rng().uniform(0.0, 1.0, 30)
    noise = np.random.default_rng(5).normal(0.0, 0.2, 30)
    assert not judge(served, served, rng()).publish
    assert not judge(served - 0.01, served, rng()).publish
    assert not judge(served + noise - noise.mean(), served, rng()).publish


def test_gate_wants_a_handful_of_records() -> None:
    decision = judge(np.ones(3), np.zeros(3), rng())
    assert not decision.publish
    assert decision.reason == "too few held-out records"
    assert decision.facts()["gain_lower_bound"] is None
    assert judge(np.ones(4), np.zeros(4), rng()).publish
    assert not judge(np.ones(0), np.ones(0), rng(), GateSettings(min_records=0)).publish


def test_gate_refuses_scores_that_do_not_pair_up() -> None:
    with pytest.raises(ValueError, match="pair up"):
        judge(np.ones(5), np.ones(6), rng())


def test_an_equal_candidate_rarely_passes() -> None:
    generator = np.random.default_rng(1)
    passed = 0
    for _ in range(200):
        served = generator.uniform(0.0, 1.0, 25)
        candidate = served + generator.normal(0.0, 0.1, 25)
        passed += judge(candidate, served, generator, GateSettings(resamples=200)).publish
    assert passed < 30  # 5 % of 200 is 10


def test_schedule_takes_traffic_times_headroom() -> None:
    assert choose([view("sql", traffic=30.0), view("code", traffic=10.0)]) == "sql"
    good = view("sql", traffic=30.0, acceptance=0.95)
    assert choose([good, view("code", traffic=10.0, acceptance=0.1)]) == "code"


def test_schedule_gives_nobody_up() -> None:
    waiting = view("code", traffic=1.0, waited_s=3_600.0)
    assert choose([view("sql", traffic=30.0), waiting]) == "code"


def test_schedule_prefers_topics_to_general() -> None:
    assert choose([view("general", traffic=100.0), view("sql", traffic=1.0)]) == "sql"
    assert choose([view("general", traffic=0.0)]) == "general"


def test_schedule_waits_for_records() -> None:
    assert choose([view("sql", records_train=3)]) is None
    assert choose([view("sql", records_held_out=3)]) is None
    assert choose([view("sql", records_train=8, records_held_out=4)]) == "sql"
    assert choose([]) is None


def test_a_published_topic_goes_on_and_a_rejected_one_wants_new_records() -> None:
    settings = ScheduleSettings()
    assert is_ready(view("sql", new_records=0), settings)
    assert not is_ready(view("sql", new_records=0, rejections=1), settings)
    assert is_ready(view("sql", new_records=4, rejections=1), settings)
    assert not is_ready(view("sql", new_records=24, rejections=3), settings)
    assert is_ready(view("sql", new_records=25, rejections=3), settings)


def test_traffic_meter_forgets_and_survives_restarted_counters() -> None:
    meter = TrafficMeter(half_life_s=10.0)
    meter.update({"math": 40, "sql": 0}, 0.0)
    meter.update({"math": 40, "sql": 15}, 20.0)
    assert meter.level("math") == pytest.approx(10.0)
    assert meter.level("sql") == pytest.approx(15.0)
    meter.update({"math": 40, "sql": 2}, 20.0)  # the shard of sql was killed
    assert meter.level("sql") == pytest.approx(17.0)
    assert meter.level("poems") == 0.0


def test_batch_has_every_emitted_position_behind_its_context() -> None:
    first = make_record(prompt=(5, 6, 7), length=4, seed=1)
    second = make_record(prompt=(9,), length=2, seed=2)
    batch = make_batch([first, second], max_length=32)
    assert batch.input_ids.tolist() == [
        [5, 6, 7, *first.output_token_ids[:-1].tolist()],
        [9, int(second.output_token_ids[0]), 0, 0, 0, 0],
    ]
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


def test_surplus_of_recorded_tokens_goes_into_the_tail() -> None:
    wide, narrow = make_record(top=6, seed=3), make_record(top=4, seed=4)
    batch = make_batch([wide, narrow], max_length=32)
    assert batch.top_ids.shape == (10, 4)
    total = batch.top_logprobs.exp().sum(-1) + batch.tail_mass
    torch.testing.assert_close(total, torch.ones(10), atol=5e-3, rtol=0.0)


def test_unusable_records_are_recognised() -> None:
    assert usable(make_record(), 32, 300)
    assert not usable(make_record(length=0), 32, 300)
    assert not usable(make_record(prompt=()), 32, 300)
    assert not usable(make_record(length=40), 32, 300)
    assert not usable(make_record(), 32, 20)


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
