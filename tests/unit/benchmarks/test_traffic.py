"""The traffic benchmark's own arithmetic: traces scaled, prompts paired, latencies summed up."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from clients import Outcome, Planned, Reply, outcome_of
from harness import Store
from held import Held
from online import traces, traffic
from online.traffic import (
    FROZEN,
    ONLINE,
    PLAIN,
    VARIANTS,
    Block,
    body,
    busy_rate,
    planned,
    speeds_of,
    turns,
)
from prompts import Prompt

from paceline.actors.weights.history import append_decision


def trace(*times: float, tokens: int = 10) -> list[traces.Arrival]:
    return [traces.Arrival(at, tokens + i, 5) for i, at in enumerate(times)]


def outcome(**changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "due_s": 0.0,
        "topic": "sql",
        "prompt_tokens": 9,
        "lag_s": 0.0,
        "ttft_s": 0.1,
        "tpot_s": 0.01,
        "e2e_s": 0.5,
        "pause_s": 0.02,
        "tokens": 10,
        "answer": "a",
        "rounds": 4,
        "drafted": 16,
        "accepted": 6,
        "first_accepted": 3,
        "suffix_drafted": 2,
        "suffix_accepted": 1,
        "draft": "sql",
        "routed": "sql",
        "weight_version": 1,
        "error": None,
    }
    return Outcome(**(fields | changes))


def test_a_trace_is_read_in_the_order_of_its_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    rows = [{"arrival_s": at, "input_tokens": 3, "output_tokens": 2} for at in (2.0, 0.5)]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert [a.at_s for a in traces.read_trace(path)] == [0.5, 2.0]
    with gzip.open(path, "wt", encoding="utf-8"):
        pass
    with pytest.raises(ValueError, match="empty"):
        traces.read_trace(path)


def test_a_window_holds_the_busiest_minute_and_what_leads_up_to_it() -> None:
    quiet, busy = [100.0 * i for i in range(20)], [2000.0 + i for i in range(8)]
    arrivals = trace(*quiet, *busy, 5000.0, 6000.0)
    assert traces.busiest_minute(arrivals) == 20
    found = traces.window(arrivals, 8)
    assert found[0].at_s == 0.0
    assert [a.input_tokens - 10 for a in found] == list(range(18, 26))  # a quarter leads up
    following = traces.window(arrivals, 8, number=1)
    assert following[0].input_tokens - 10 == (26 % (30 - 8 + 1))  # past the end: from the start
    with pytest.raises(ValueError, match="window of 31"):
        traces.window(arrivals, 31)


def test_a_stretched_trace_has_the_rate_and_keeps_its_bursts() -> None:
    arrivals = trace(5.0, 6.0, 6.5, 15.0)
    found = traces.at_rate(arrivals, rate=2.0)
    assert found[0].at_s == 0.0
    assert found[-1].at_s == pytest.approx(3 / 2.0)
    gaps = np.diff([a.at_s for a in found])
    assert gaps == pytest.approx(np.array([1.0, 0.5, 8.5]) * 1.5 / 10.0)
    with pytest.raises(ValueError, match="cannot be brought"):
        traces.at_rate(trace(1.0, 1.0), 2.0)


def test_answers_are_scaled_down_to_the_room_but_never_up() -> None:
    long = [traces.Arrival(0.0, 1, tokens) for tokens in range(1, 1001)]
    found = traces.answer_tokens(long, long, 100)
    assert found[499] == pytest.approx(500 * 100 / 990, abs=1)
    assert (min(found), max(found)) == (1, 100)
    short = [traces.Arrival(0.0, 1, tokens) for tokens in (3, 7)]
    assert traces.answer_tokens(short, short, 100) == [3, 7]


def test_prompts_are_paired_by_rank() -> None:
    wanted, lengths = [900, 20, 5000, 20], [7, 300, 8, 50]
    paired = traces.pair_by_rank(wanted, lengths)
    assert [lengths[i] for i in paired] == [50, 7, 300, 8]
    assert sorted(paired) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="4 requests and 1"):
        traces.pair_by_rank(wanted, [1])


def test_a_generated_trace_is_the_same_for_a_seed_and_has_its_rate() -> None:
    found = traces.generated(6000, seed=3, rate=2.0)
    assert found == traces.generated(6000, seed=3, rate=2.0)
    assert found != traces.generated(6000, seed=4, rate=2.0)
    gaps = np.diff([a.at_s for a in found])
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() == pytest.approx(0.5, rel=0.1)  # as of a Poisson process


def some_prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), "sql", tuple(range(2 + i)), f"text {i}") for i in range(count)]


def test_every_variant_is_sent_the_same_but_plain_drafts_nothing() -> None:
    arrivals, own = trace(0.0, 1.0, 2.0), some_prompts(3)
    sent = {v: planned(arrivals, [1, 2, 3], own, v) for v in (PLAIN, ONLINE)}
    texts = {v: [p.body["messages"][0]["content"] for p in own] for v, own in sent.items()}
    assert texts[PLAIN] == texts[ONLINE] == ["text 0", "text 1", "text 2"]
    assert [p.due_s for p in sent[ONLINE]] == [0.0, 1.0, 2.0]
    assert [p.body["max_tokens"] for p in sent[ONLINE]] == [1, 2, 3]
    assert body("x", 4, PLAIN)["speculative"] == {"draft": "off"}
    assert "speculative" not in body("x", 4, ONLINE)
    assert not any("store" in body("x", 4, v) for v in VARIANTS)


def test_every_variant_is_first_as_often_at_every_load() -> None:
    traces, loads = ["code", "conv"], (0.3, 0.6, 0.9)
    orders = {
        (trace, load, repeat): turns(Block(trace, load, repeat, 9.0), traces, loads)
        for trace in traces
        for load in loads
        for repeat in range(4)
    }
    for trace in traces:
        for load in loads:
            for place in range(4):
                assert {orders[trace, load, r][place] for r in range(4)} == set(VARIANTS)
    assert len({orders["code", load, 0][0] for load in loads}) == 3
    assert orders["code", 0.3, 0] != orders["conv", 0.3, 0]


class Here(traffic.Traffic):
    """Blocks of two loads over a small pool, none of them served."""

    def __init__(self, pool: int, store: Store, *line: str) -> None:
        self.options, self.store = traffic.parse(["--quick", *line]), store
        self.traces = {"t": traces.generated(500, seed=1)}
        self.prompts = some_prompts(pool)
        self.common = {}
        self.seen: list[tuple[str, list[str]]] = []

    def capacity(self, trace: str) -> float:  # noqa: ARG002
        return 2.0

    def _serve(self, start: int, block: Block, variant: str) -> dict[str, Any]:
        requests = self._planned(block.trace, self._arrivals(block), start, variant)
        self.seen.append((variant, [r.body["messages"][0]["content"] for r in requests]))
        return {"outcomes": [asdict(outcome())]}


@pytest.mark.parametrize(("pool", "again"), [(142, 0), (136, 6)])
def test_lesson_and_blocks_share_no_prompt_until_the_pool_is_empty(
    pool: int, again: int, tmp_path: Path
) -> None:
    runs = Here(pool, Store(tmp_path), "--lesson", "150")
    blocks = runs.blocks()
    assert runs.needed([]) == 30  # 150 s at a tenth of 2/s
    assert runs.needed(blocks) - len(runs.prompts) == again
    for number, block in enumerate(blocks):
        for unit in runs.run(block, runs.needed(blocks[:number])):
            assert unit.items() >= asdict(block).items()  # what the report is made of
    parts = [part for variant, part in runs.seen if variant == PLAIN]
    assert [len(part) for part in parts] == [20, 36, 20, 36]  # 20 s at 0.3 (the least) and 0.9
    counts = Counter(text for part in parts for text in part)
    assert all(n == 1 for n in counts.values())
    of_lesson = {prompt.text for prompt in runs.prompts[:30]}
    assert len(of_lesson & set(counts)) == again
    for variant in VARIANTS:
        assert [part for own, part in runs.seen if own == variant] == parts


def test_what_is_there_is_not_served_again(tmp_path: Path) -> None:
    runs = Here(400, Store(tmp_path))
    block, other = runs.blocks()[:2]
    units = runs.run(block, 0)
    assert [unit["variant"] for unit in units] == list(VARIANTS)
    assert runs.run(block, 0) == units
    assert len(runs.seen) == 4
    runs.run(block, 9)  # other prompts
    runs.run(other, 0)
    assert len(runs.seen) == 12


def test_a_block_that_was_broken_off_is_served_again_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Here(400, Store(tmp_path))
    block = runs.blocks()[0]
    serve = runs._serve

    def broken_off(start: int, block: Block, variant: str) -> dict[str, Any]:
        if len(runs.seen) == 2:
            raise KeyboardInterrupt
        return serve(start, block, variant)

    monkeypatch.setattr(runs, "_serve", broken_off)
    with pytest.raises(KeyboardInterrupt):
        runs.run(block, 0)
    monkeypatch.setattr(runs, "_serve", serve)
    runs.run(block, 0)
    assert [variant for variant, _ in runs.seen] == [*VARIANTS[:2], *VARIANTS]


class Starting:
    """A server that never gets ready."""

    def __init__(self, *_: object) -> None:
        self.held = Held(subprocess.Popen(["sleep", "300"], text=True))

    def start(self) -> None:
        raise RuntimeError("not ready")

    def end(self) -> None:
        self.held.end(signal.SIGTERM)


def test_a_server_is_noted_before_it_is_ready_and_ended_though_it_never_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "Turns", Starting)
    runs = Here(9, Store(tmp_path))
    runs._servers, runs._work = {}, tmp_path
    with pytest.raises(RuntimeError, match="not ready"):
        runs._server(PLAIN)
    held = runs._servers[PLAIN].held
    noted = json.loads((tmp_path / "processes.json").read_text(encoding="utf-8"))
    assert [pid for pid, _ in noted] == [held.first.pid]
    runs.end()
    assert not held.alive


def test_the_config_of_every_variant_is_in_the_key() -> None:
    options = traffic.parse(["--quick", "--target", "small"])
    facts = traffic.config_facts(options)
    assert {own["target"]["prefix_cache"] for own in facts.values()} == {True}
    assert [own["training"]["enabled"] for own in facts.values()] == [False, False, False, True]
    options.port, options.dtype = 1, "float32"
    other = traffic.config_facts(options)
    assert other != facts
    options.dtype = "auto"
    assert traffic.config_facts(options) == facts


def test_capacity_counts_neither_the_begin_nor_the_end_in_which_the_server_runs_empty() -> None:
    steady = [1.0 + i for i in range(20)]
    assert busy_rate([*steady[::-1], 0.1, 60.0, 90.0], at_once=2) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="2 at once"):
        busy_rate([1.0, 2.0, 3.0, 4.0], at_once=2)


def test_the_clock_waits_for_a_trainer_that_has_something_to_load() -> None:
    def up(**trainer: Any) -> bool:
        return traffic.is_started({"trainer": trainer})

    assert not traffic.is_started({"trainer": None})  # it does not answer yet
    assert not up()
    assert not up(state="starting", micro_steps=0)
    assert not up(state="waiting for a permit", micro_steps=0)
    assert up(state="no new records", micro_steps=0)
    assert up(state="training", micro_steps=1)


def test_decisions_are_counted_by_outcome(tmp_path: Path) -> None:
    for at, name in enumerate(("published", "rolled_back", "published", "promoted")):
        append_decision(tmp_path / "history.jsonl", {"outcome": name, "time": at})
    found = traffic.decisions_of(tmp_path)
    assert found == {"published": 2, "rolled_back": 1, "promoted": 1}
    assert not traffic.decisions_of(tmp_path / "none")


def test_a_reply_is_measured_from_when_it_was_due() -> None:
    reply = Reply(
        token_ids=[1, 2, 3],
        finish="stop",
        pauses_s=[0.4, 0.1, 0.7],
        last_at=102.0,
        token_times=[101.0],
        first_tokens=1,
        speculative={
            "num_spec_steps": 2,
            "num_draft_tokens": 8,
            "num_accepted_draft_tokens": 1,
            "acceptance_histogram": [1, 1],
            "num_suffix_tokens": 5,
            "num_accepted_suffix_tokens": 4,
            "draft": "sql",
            "topic": "sql",
            "weight_version": 3,
        },
    )
    plan = Planned(0.5, "sql", 4, {})
    found = outcome_of(plan, 0.7, 100.0, reply)
    assert (found.lag_s, found.ttft_s, found.e2e_s) == pytest.approx((0.2, 0.5, 1.5))
    assert (found.tpot_s, found.pause_s) == pytest.approx((0.5, 0.7))
    assert (found.first_accepted, found.accepted, found.weight_version) == (1, 1, 3)
    assert (found.suffix_drafted, found.suffix_accepted) == (5, 4)
    reply.first_tokens = 2  # a round's tokens come together, and took none of the time behind them
    assert outcome_of(plan, 0.7, 100.0, reply).tpot_s == pytest.approx(1.0)
    reply.first_tokens = 3
    assert outcome_of(plan, 0.7, 100.0, reply).tpot_s is None
    nothing = outcome_of(plan, 0.7, 100.0, Reply(error="refused"))
    assert (nothing.ttft_s, nothing.tpot_s, nothing.rounds) == (None, None, 0)


def test_latencies_and_speculation_are_of_whole_answers() -> None:
    found = traffic.summary(
        [
            outcome(due_s=9.5),
            outcome(ttft_s=0.5),
            outcome(tpot_s=0.03, lag_s=0.4),
            outcome(error="HTTP 503", ttft_s=9.0),
            outcome(tokens=1, tpot_s=None),
        ],
    )
    assert (found["requests"], found["failed"], found["tokens"]) == (5, 1, 31)
    assert found["first"] == pytest.approx(0.75)
    assert found["tokens_per_round"] == pytest.approx(31 / (31 - 4 * 6 - 4 * 1))
    assert (found["accepted"], found["suffix_drafted"], found["suffix_accepted"]) == (24, 8, 4)
    assert (found["drafted"], found["lag_s"]) == (64, 0.4)
    assert found["ttft_p50_s"] == pytest.approx(0.1)
    assert found["ttft_p99_s"] == pytest.approx(np.percentile([0.1, 0.5, 0.1, 0.1], 99))
    assert found["tpot_p50_s"] == pytest.approx(0.01)  # an answer of one token has none


def test_a_block_without_a_whole_answer_has_no_latencies() -> None:
    found = traffic.summary([outcome(error="HTTP 503")])
    assert (found["failed"], found["tokens"]) == (1, 0)
    assert found["ttft_p50_s"] is found["tokens_per_round"] is None


def unit(variant: str, repeat: int, seconds: float, answers: str = "ab") -> dict[str, Any]:
    outcomes = [outcome(answer=a, ttft_s=seconds) for a in answers]
    return {
        **{"trace": "t", "load": 0.5, "repeat": repeat, "variant": variant},
        "decisions": {"published": 2, "rolled_back": 1},
        "cpu_s": 3.0 + repeat + 1.0,
        "trainer_cpu_s": repeat + 1.0,
        "outcomes": [asdict(o) for o in outcomes],
    }


def test_the_report_sums_up_blocks_and_counts_answers_that_differ() -> None:
    units = [
        unit("online", 0, 0.2, "ax"),
        unit("plain", 0, 0.4),
        unit("online", 1, 0.4, "aba"),
        unit("plain", 1, 0.8, "aba"),
    ]
    rows = traffic.rows_of(units)
    assert [row["variant"] for row in rows] == ["plain", "online"]
    assert rows[1]["requests"] == 5
    assert rows[1]["ttft_p50_s"] == pytest.approx(0.4)  # over all requests, not over blocks
    assert rows[1]["ttft_p50_times_plain"] == pytest.approx(0.5)
    assert rows[0]["tpot_p99_times_plain"] == 1.0
    assert (rows[1]["published"], rows[1]["promoted"], rows[1]["rolled_back"]) == (4, 0, 2)
    assert (rows[1]["cpu_s"], rows[1]["trainer_cpu_s"]) == (9.0, 3.0)
    differ = traffic.answers_that_differ(units)
    assert differ["online"] == {"compared": 5, "differ": 1}


def test_speeds_are_those_of_the_same_requests() -> None:
    def served(variant: str, repeat: int, *seconds: float, failed: int = -1) -> dict[str, Any]:
        own = [
            outcome(due_s=4.0 * i, ttft_s=s, error="HTTP 503" if i == failed else None)
            for i, s in enumerate(seconds)
        ]
        block = {"trace": "t", "load": 0.5, "repeat": repeat, "variant": variant}
        return block | {"outcomes": [asdict(o) for o in own]}

    units = [
        *(served("plain", 0, 0.4, 8.0, 1.0), served("plain", 1, 0.8, 1.6, 1.0)),
        *(served("online", 0, 0.2, 1.0, 9.0, failed=2), served("online", 1, 0.4, 0.1, 1.0)),
    ]
    found = {(row["figure"], row["variant"], row["against"]): row for row in speeds_of(units)}
    first = found["ttft_s", "online", "plain"]
    assert (first["requests"], first["blocks"]) == (5, 2)
    assert first["ratio"] == pytest.approx(((2 * 8) ** (1 / 2) * (2 * 16 * 1) ** (1 / 3)) ** 0.5)
    assert found["tpot_s", "online", "plain"]["ratio"] == pytest.approx(1.0)
    assert "ratio" not in found["ttft_s", FROZEN, "plain"]
    failed = [served("plain", 0, 0.4), served("online", 0, 0.4, failed=0)]
    assert all("ratio" not in row for row in speeds_of(failed))


def test_processor_seconds_are_counted_by_role() -> None:
    before = processes.seconds()
    sum(i * i for i in range(3_000_000))
    spent = processes.since(before)
    assert spent["client"] > 0.01
    assert processes.since(processes.seconds())["client"] < spent["client"]


def test_a_shorter_run_is_asked_for_by_the_command_line() -> None:
    full, quick = traffic.parse([]), traffic.parse(["--quick"])
    assert (full.seconds, full.repeats, full.loads, full.lesson) == (30.0, 8, [0.3, 0.6, 0.9], 600)
    assert (quick.seconds, quick.repeats, quick.loads, quick.lesson) == (20.0, 2, [0.3, 0.9], 60)
    assert traffic.parse(["--quick", "--seconds", "90"]).seconds == 90.0
