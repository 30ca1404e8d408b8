"""The benchmarks' own arithmetic: paired ratios, blocks, phases, prompts, cached experts."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import decoding
import exactness
import experts
import generate
import harness
import phases
import prompts
import pytest
import torch
from engines import make_engine
from models import TARGET
from tiny_models import tiny_llama
from training_records import training_record

from paceline.actors.engine.model_loader import load_tokenizer
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.expert_evaluation import score_records
from paceline.actors.training.settings import DistillerSettings
from paceline.deploy.demo.prompts import TOPICS


def timings(rates: dict[str, list[tuple[str, float]]]) -> list[harness.Timing]:
    """Blocks of 100 tokens, by variant and (topic, tokens per second)."""
    return [
        harness.Timing(variant, block, topic, 100, 100.0 / rate)
        for variant, blocks in rates.items()
        for block, (topic, rate) in enumerate(blocks)
    ]


def test_a_ratio_is_the_geometric_mean_over_topics_of_unequal_blocks() -> None:
    found = timings(
        {
            "fast": [("sql", 80.0), ("sql", 80.0), ("sql", 80.0), ("math", 10.0), ("math", 10.0)],
            "slow": [("sql", 10.0), ("sql", 10.0), ("sql", 10.0), ("math", 5.0), ("math", 5.0)],
        }
    )
    ratio = harness.paired_ratio(found, "fast", "slow")
    assert ratio.ratio == pytest.approx(4.0)  # sqrt(8 * 2), though sql has more blocks
    assert ratio.low == pytest.approx(4.0)
    assert ratio.high == pytest.approx(4.0)
    assert ratio.blocks == 5


def test_speed_of_many_in_flight_counts_from_the_first_ends_until_fewer_are_left() -> None:
    one = [([101.0, 110.0], 90), ([111.0, 120.0], 80)]
    assert harness.while_all_run(one, 1) == (80, 10.0)
    ends = (
        [104.0],
        [100.0, 107.0, 110.0],
        [106.0, 109.0, 112.0, 114.0],
        [111.0, 120.0, 125.0, 130.0],
    )
    # From 110 to 114: two of the third's events, one of the last's.
    assert harness.while_all_run([(times, 100) for times in ends], 2) == (75, 4.0)


def served(lengths: list[int], in_flight: int) -> list[tuple[list[float], int]]:
    """Replies of a server that takes 20 s for a prompt and 5 s for one token of all answers."""
    now, waiting = 0.0, list(lengths)
    running, found = list[tuple[list[float], int]](), list[tuple[list[float], int]]()
    while waiting or running:
        while waiting and len(running) < in_flight:
            now += 20.0
            running.append(([], waiting.pop(0)))
        now += 5.0
        for times, _ in running:
            times.append(now)
        found += [answer for answer in running if len(answer[0]) == answer[1]]
        running = [answer for answer in running if len(answer[0]) < answer[1]]
    return found


@pytest.mark.parametrize("in_flight", [1, 2, 4, 8, 16])
def test_speed_of_many_in_flight_hangs_on_the_server_alone(in_flight: int) -> None:
    count, rates = in_flight * harness.FILLS, []
    asked = harness.answer_lengths(96, in_flight, count)
    assert asked == [96 * (i + 1) // in_flight for i in range(in_flight)] + [96] * (
        count - in_flight
    )
    varied = [length + (17 * i) % 9 - 4 for i, length in enumerate(asked)]
    for lengths in ([96] * count, asked, varied):
        counted, seconds = harness.while_all_run(served(lengths, in_flight), in_flight)
        rates.append(counted / seconds)
    assert rates == pytest.approx([in_flight * 96 / (20 * in_flight + 5 * 96)] * 3, rel=0.02)
    with pytest.raises(ValueError, match="too few"):
        harness.while_all_run(served(asked, in_flight)[: 2 * in_flight - 1], in_flight)


def test_the_interval_is_students_for_one_topic() -> None:
    logs = [0.1, 0.2, 0.3]
    found = timings(
        {
            "a": [("sql", math.exp(value)) for value in logs],
            "b": [("sql", 1.0) for _ in logs],
        }
    )
    ratio = harness.paired_ratio(found, "a", "b")
    reach = 4.302653 * 0.1 / math.sqrt(3)  # t(0.975, 2) times the standard error
    assert ratio.ratio == pytest.approx(math.exp(0.2))
    assert ratio.low == pytest.approx(math.exp(0.2 - reach))
    assert ratio.high == pytest.approx(math.exp(0.2 + reach))


@pytest.mark.full
def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, covered, runs = random.Random(3), 0, 600
    for _ in range(runs):
        a, b = [], []
        for block in range(8):
            # What disturbs the machine for a while disturbs both: it must not widen the interval.
            disturbance = rng.gauss(0.0, 1.0)
            topic, gain = ("sql", 0.9) if block % 2 else ("math", 0.1)
            a.append((topic, math.exp(gain + disturbance + rng.gauss(0.0, 0.1))))
            b.append((topic, math.exp(disturbance + rng.gauss(0.0, 0.1))))
        ratio = harness.paired_ratio(timings({"a": a, "b": b}), "a", "b")
        assert ratio.low is not None
        assert ratio.high is not None
        assert ratio.high / ratio.low < 1.8
        covered += ratio.low <= math.exp(0.5) <= ratio.high
    assert 0.92 <= covered / runs <= 0.98


def test_single_blocks_per_topic_and_a_single_block() -> None:
    spread = timings(
        {"a": [("sql", 2.0), ("math", 4.0)], "b": [("sql", 1.0), ("math", 1.0)]},
    )
    ratio = harness.paired_ratio(spread, "a", "b")
    assert ratio.low is not None
    assert ratio.low < ratio.ratio == pytest.approx(math.sqrt(8.0))
    alone = timings({"a": [("sql", 2.0)], "b": [("sql", 1.0)]})
    assert harness.paired_ratio(alone, "a", "b") == harness.Ratio(pytest.approx(2.0), None, None, 1)


def test_the_settings_of_a_run_are_its_options_without_folders_of_this_machine() -> None:
    parser = harness.arguments("Study.", "data", "threads", "out")
    parser.add_argument("--draft", type=Path)
    found = harness.written(parser.parse_args(["--data", "/rows", "--draft", "a/b"]))
    assert found == {"threads": 1, "draft": "a/b"}


def test_unpaired_blocks_are_refused() -> None:
    found = timings({"a": [("sql", 1.0), ("sql", 1.0)], "b": [("sql", 1.0)]})
    with pytest.raises(ValueError, match="same blocks"):
        harness.paired_ratio(found, "a", "b")
    with pytest.raises(ValueError, match="twice"):
        harness.paired_ratio(found + found, "a", "b")


def test_every_variant_runs_at_every_place_of_the_order() -> None:
    orders = [harness.rotation("abc", turn) for turn in range(3)]
    assert sorted(map("".join, zip(*orders, strict=True))) == ["abc", "bca", "cab"]


def test_differing_names_the_prompts() -> None:
    expected = {"a": [1, 2], "b": [3], "c": [4, 5]}
    assert harness.differing({"a": [1, 2], "b": [3, 3], "c": [4]}, expected) == ["b", "c"]
    with pytest.raises(ValueError, match="different prompts"):
        harness.differing({"a": [1, 2]}, expected)


def some_prompts(per_topic: int) -> dict[str, list[prompts.Prompt]]:
    """Random prompts of two topics, whose experts are the tiny engine's."""
    rng = random.Random(5)
    made = [
        prompts.Prompt(f"{i}", "ab"[i % 2], tuple(rng.randrange(3, 300) for _ in range(3 + i % 5)))
        for i in range(2 * per_topic)
    ]
    return {topic: [p for p in made if p.topic == topic] for topic in "ab"}


def test_blocks_share_no_prompt_and_topics_take_turns() -> None:
    blocks = decoding.make_blocks(some_prompts(9), 3, 2)
    assert [block.topic for block in blocks] == ["a", "a", "b", "a", "b"]
    assert [block.number for block in blocks] == [0, 1, 2, 3, 4]
    keys = [p.key for block in blocks for p in block.prompts]
    assert len(keys) == len(set(keys)) == 15
    assert all(p.topic == block.topic for block in blocks for p in block.prompts)
    with pytest.raises(ValueError, match="fewer"):
        decoding.make_blocks(some_prompts(8), 3, 2)


def test_full_blocks_keep_all_rows_at_work_and_prompts_come_again() -> None:
    blocks = decoding.make_full_blocks(some_prompts(8), 5, 3)
    assert [(block.number, block.topic) for block in blocks] == [*zip(range(4), "abab")]  # noqa: B905
    assert {len(block.prompts) for block in blocks} == {5 * harness.FILLS}


class Named:
    """A variant that only notes when it ran."""

    def __init__(self, name: str, ran: list[str]) -> None:
        self.name, self._ran = name, ran

    def run(self, own: object, *_: object) -> decoding.Run:
        self._ran.append(self.name)
        return decoding.Run([[1]] * len(own), 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("topics", [1, 2, 3, 4])
def test_no_variant_is_always_first_with_a_topic(
    topics: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding.gc, "collect", lambda: None)  # of all that other tests have made
    one = prompts.Prompt("p", "", ())
    blocks = [decoding.Block(i, str(i % topics), (one,)) for i in range(1, 4 * topics + 1)]
    ran: list[str] = []
    decoding.run_cell(decoding.Cell(1, 0.0), [Named("x", ran), Named("y", ran)], blocks, 1)
    firsts = {(block.topic, ran[2 * i]) for i, block in enumerate(blocks)}
    assert len(firsts) == 2 * topics


def test_what_warms_up_is_not_among_the_runs_of_a_cell() -> None:
    one = prompts.Prompt("p", "", ())
    blocks = [decoding.Block(i, "", (one,) * (i + 1)) for i in range(3)]
    outcome = decoding.run_cell(decoding.Cell(1, 0.8), [Named("x", [])], blocks, 1)
    assert [len(run.outputs) for run in outcome.runs["x"]] == [2, 3]


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, 3])
def test_all_variants_give_the_same_greedy_answers(batch: int) -> None:
    """The real engine and the real peers over one tiny target, through one cell."""
    target = tiny_llama(1, vocab=300)
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = 2
    engine = make_engine()
    variants: list[decoding.Variant] = [
        generate.Generate(target),
        decoding.Served("off", engine, 0),
        decoding.Served("on", engine, 3),
    ]
    if batch == 1:
        drafts = {"a": tiny_llama(2, layers=1, vocab=300), "b": tiny_llama(3, layers=1, vocab=300)}
        variants.append(generate.Assisted("assisted", target, drafts, tokens=2))
    cell = decoding.Cell(batch, 0.0)
    blocks = decoding.make_blocks(some_prompts(8), 4, 1)
    outcome = decoding.run_cell(cell, variants, blocks, 12)
    figures = decoding.summary(cell, outcome, [("on", "off")], "generate")
    for facts in figures["variants"].values():
        assert (facts["answers"], facts["answers_that_differ"]) == (8, 0)
    assert figures["variants"]["on"]["mean_acceptance_length"] >= 1.0
    assert figures["variants"]["off"]["mean_acceptance_length"] is None
    assert figures["ratios"]["on / off"]["blocks"] == 2


def test_no_more_requests_are_in_flight_than_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    seen: list[int] = []
    step = engine.step

    def watching() -> object:
        seen.append(engine.num_running + engine.num_waiting)
        return step()

    monkeypatch.setattr(engine, "step", watching)
    own = some_prompts(8)["a"]
    run = decoding.Served("on", engine, None).run(own, 3, 0.0, 10)
    assert max(seen) == 3
    assert [len(tokens) for tokens in run.outputs] == [10] * len(own)


def test_phases_are_exclusive_and_a_prefill_is_all_prefill() -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 4.0, 10.0, 15.0, 16.0])
    clock = phases.PhaseClock(lambda: next(now))
    with clock.phase("round"):
        with clock.phase("draft"):
            pass
        with clock.phase(phases.PREFILL), clock.phase("verify"):
            pass
    assert clock.seconds == {"round": 3.0, "draft": 2.0, phases.PREFILL: 11.0}


def test_phases_of_a_real_engine_add_up_and_nothing_stays_wrapped() -> None:
    engine = make_engine()
    before = type(engine).step
    with phases.watched(engine) as clock:
        decoding.Served("on", engine, 3).run(some_prompts(2)["a"], 1, 0.0, 10)
    assert type(engine).step is before
    split = phases.shares(clock.seconds)
    assert all(share > 0.0 for share in split.values())
    assert sum(split.values()) == pytest.approx(1.0)
    assert 0.0 < phases.overhead(split) < 1.0


def test_experts_never_learn_from_the_benchs_prompts() -> None:
    tokenizer = load_tokenizer(TARGET)
    for topic in TOPICS:
        measured = prompts.measured_prompts(None, topic, tokenizer)
        learnt = prompts.training_prompts(None, topic, tokenizer, 400)
        assert len({p.token_ids for p in learnt}) == 400
        assert len({p.token_ids for p in measured}) == prompts.RESERVED
        assert not {p.token_ids for p in learnt} & {p.token_ids for p in measured}


def some_texts(*texts: str) -> list[prompts.Prompt]:
    return [prompts.Prompt(text, "sql", (len(text),)) for text in texts]


def test_an_expert_is_kept_until_its_recipe_or_its_file_changes(tmp_path: Path) -> None:
    folder = tmp_path / "sql"
    recipe = experts.recipe_of(some_texts("a", "b"), {"seconds": 1.0})
    assert not experts.is_current(folder, recipe)
    experts.save_expert(folder, {"w": torch.ones(3)}, recipe, {"steps": 1})
    assert experts.is_current(folder, recipe)
    assert (folder / "tokenizer.json").is_file()
    for other in (
        experts.recipe_of(some_texts("a", "c"), {"seconds": 1.0}),
        experts.recipe_of(some_texts("a", "b"), {"seconds": 2.0}),
        recipe | {"base": {"target/model.safetensors": "0"}},
    ):
        assert not experts.is_current(folder, other)
    (folder / "model.safetensors").write_bytes(b"cut short")
    assert not experts.is_current(folder, recipe)


def test_the_bench_takes_an_expert_of_any_settings_but_no_other_prompts_or_weights(
    tmp_path: Path,
) -> None:
    texts = prompts.training_prompts(None, "sql", load_tokenizer(TARGET), 3)
    recipe = experts.recipe_of(texts, {"answers": 3, "seconds": 1.0})

    def stands(of: dict[str, object]) -> bool:
        experts.save_expert(tmp_path / "sql", {"w": torch.ones(3)}, of, {"steps": 1})
        return experts.is_usable(tmp_path / "sql", "sql", None)

    assert not experts.is_usable(tmp_path / "sql", "sql", None)
    assert stands(recipe)
    assert stands(experts.recipe_of(texts, {"answers": 3, "seconds": 45.0}))
    assert not stands(recipe | {"prompts": "0"})
    assert not stands(recipe | {"base": {}})
    assert not stands(recipe | {"settings": {"answers": 2, "seconds": 1.0}})


@pytest.mark.full
@pytest.mark.usefixtures("deepspeed")
def test_offline_training_keeps_the_best_weights_and_ends_without_gains(draft: Path) -> None:
    records = [training_record(number) for number in range(60)]
    settings = DistillerSettings(learning_rate=5e-3, dtype="float32")
    distiller = Distiller(str(draft), settings)
    offline = experts.Offline(
        micro_batch=8, steps_per_look=10, patience=2, held_out_fraction=0.3, max_steps=400
    )
    best, facts = experts.distil(records, distiller, offline)
    values = [look[2] for look in facts["looks"]]
    assert facts["held_out_acceptance"] == pytest.approx(max(values), abs=0.0011)
    assert max(values) > values[0]
    _, held_out = experts.split_records(records, 0.3)
    scores = score_records(distiller.served(best), held_out, max_length=512)
    assert scores.mean() == pytest.approx(facts["held_out_acceptance"])
    assert facts["converged"] == (facts["looks"][-1][0] < 400)
    distiller.reset(None)
    _, facts = experts.distil(records, distiller, replace(offline, max_seconds=0.0))
    assert facts["looks"] == facts["looks"][:1]
    with pytest.raises(ValueError, match="too few"):
        experts.distil(records[:1], distiller, offline)


@pytest.mark.usefixtures("deepspeed")
def test_offline_training_goes_on_where_it_was_stopped(draft: Path, tmp_path: Path) -> None:
    records = [training_record(number) for number in range(60)]
    distiller = Distiller(str(draft), DistillerSettings(learning_rate=5e-3, dtype="float32"))
    whole = experts.Offline(8, steps_per_look=10, patience=2, max_steps=60)
    kept = tmp_path / "kept.safetensors"
    first, stopped = experts.distil(records, distiller, replace(whole, max_steps=20), kept)
    distiller.reset(None)
    _, facts = experts.distil(records, distiller, whole, kept)
    assert facts["looks"][:3] == stopped["looks"]
    assert [look[0] for look in facts["looks"]] == [0, 10, 20, 30, 40, 50, 60]
    assert facts["held_out_acceptance"] >= stopped["held_out_acceptance"]
    distiller.reset(None)
    again, same = experts.distil(records, distiller, replace(whole, max_steps=20), kept)
    assert same["looks"] == facts["looks"]  # it was over
    assert again.keys() == first.keys()
    _, held_out = experts.split_records(records, 0.1)
    scores = score_records(distiller.served(again), held_out, max_length=512)
    assert scores.mean() == pytest.approx(facts["held_out_acceptance"])


def test_a_broken_promise_of_invariance_is_a_fault() -> None:
    def result(numerics: str, differ: int) -> dict[str, object]:
        ways = {"off, 8 at once": 0, "on, 8 at once": differ}
        return {"dtype": "bfloat16", "numerics": numerics, "answers": 104, "differ": ways}

    assert exactness.broken([result("invariant", 0), result("varying", 7)]) == []
    [fault] = exactness.broken([result("invariant", 1)])
    assert fault == "bfloat16, on, 8 at once: 1 of 104 answers differ"
