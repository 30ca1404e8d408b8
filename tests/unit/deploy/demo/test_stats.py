"""Statistics of the demo: sums, rolling curves, version changes and the summary's keys."""

import json
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from paceline.deploy.demo import plot, report
from paceline.deploy.demo.report import (
    LiveState,
    answer_line,
    decision_text,
    progress_line,
    render,
)
from paceline.deploy.demo.stats import (
    ARMS,
    Arm,
    FailedRequest,
    RequestLog,
    RequestResult,
    Stage,
    Throughput,
    rolling_acceptance,
    totals,
    version_changes,
)


def request_result(
    order: int,
    accepted: int,
    topic: str = "sql",
    arm: Arm = "online",
    part: Stage = "stream",
    version: int = 0,
    routed: str = "sql",
    answer: str = "SELECT 1;",
) -> RequestResult:
    return RequestResult(
        order=order,
        topic=topic,
        routed=routed,
        arm=arm,
        part=part,
        at=float(order),
        latency=0.5,
        drafted=40,
        accepted=accepted,
        steps=10,
        tokens=10 + accepted,
        weight_version=version,
        prompt="How many?",
        answer=answer,
    )


def test_totals_are_sums_not_means_of_rates() -> None:
    long = RequestResult(1, "sql", "sql", "online", "stream", 1.0, 1.5, 80, 60, 20, 80, 0, "q", "a")
    got = totals([request_result(0, 10), long])
    assert got.acceptance_rate == pytest.approx(70 / 120)
    assert got.mean_acceptance_length == pytest.approx(1 + 70 / 30)
    assert got.tokens_per_second == pytest.approx(100 / 2.0)


def test_rates_without_results_are_none() -> None:
    got = totals([])
    assert (got.acceptance_rate, got.mean_acceptance_length, got.tokens_per_second) == (None,) * 3


def test_rolling_acceptance_uses_the_window_only() -> None:
    results = [request_result(i, 0) for i in range(6)] + [
        request_result(i, 40) for i in range(6, 12)
    ]
    points = dict(rolling_acceptance(results[::-1], window=6))
    assert min(points) == 1  # a third of the window
    assert points[5] == 0.0
    assert points[8] == 0.5
    assert points[11] == 1.0


def test_version_changes_are_the_first_answers_of_newer_versions() -> None:
    versions = [0, 0, 1, 0, 1, 3, 2, 3]
    results = [request_result(i, 1, version=v) for i, v in enumerate(versions)]
    assert version_changes(results) == [(2, 1), (5, 3)]


def test_log_selects_and_has_the_routing_accuracy() -> None:
    log = RequestLog(
        [
            request_result(0, 1),
            request_result(1, 1, routed="math"),
            request_result(1, 1, arm="frozen"),
        ]
    )
    assert log.routing_accuracy() == 0.5
    assert len(list(log.select("sql", "online"))) == 2
    assert [s.order for s in log.recent("sql", "online", 1)] == [1]


def _full_log() -> RequestLog:
    log = RequestLog()
    for topic in ("math", "sql"):
        for i in range(30):
            log.results.append(request_result(i, 4 + i, topic, version=i // 10))
            log.results.append(request_result(0, 40, topic, "online", "warmup"))
            log.results.append(request_result(i, 24, topic, "online", "last", version=2))
            log.results.append(request_result(i, 4, topic, "frozen", "last"))
            if i < 10:
                log.results.append(request_result(i, 0, topic, "plain", "last"))
    return log


def test_summary_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    speed = Throughput()
    speed.add("plain", 100, 2.0)
    speed.add("frozen", 120, 2.0)
    speed.add("online", 90, 0.5)
    speed.add("online", 90, 0.5)
    decisions = [{"outcome": "published"}, {"outcome": "published"}, {"outcome": "rejected"}]
    log = _full_log()
    result = report.summarize(("math", "sql"), log, speed, decisions, {"sql": 2}, 321.04, 3)
    assert result == {
        "topics": {
            topic: {
                "acceptance_rate_first": 0.125,
                "acceptance_rate_last": 0.6,
                "frozen_acceptance_rate_last": 0.1,
                "mean_acceptance_length_last": 3.4,
                "weight_version": version,
            }
            for topic, version in (("math", 0), ("sql", 2))
        },
        "tokens_per_second": {"plain": 50.0, "frozen": 60.0, "online": 180.0},
        "updates": {"published": 2, "rejected": 1},
        "answers": {"compared": 20, "changed": 0},
        "last_prompts": {"math": 30, "sql": 30},
        "wall_seconds": 321.0,
        "goals": {
            "sql_gain": True,
            "online_faster_than_plain": True,
            "online_faster_than_frozen": True,
            "no_failed_request": True,
            "answers_unchanged": True,
        },
    }
    report.write(result, log, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == result
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == len(log.results)
    assert not {"prompt", "answer"} & rows[0].keys()  # no texts
    assert report.result_table(result, 40).row_count == 2
    assert "online drafts 180 (3.60x)" in report.result_lines(result)[0]


def test_goals_of_a_run() -> None:
    log, slow = _full_log(), Throughput()
    log.failures.append(FailedRequest("sql", "online", 2.0, "HTTP 500"))
    log.results = [s for s in log.results if (s.topic, s.arm, s.part) != ("sql", "online", "last")]
    log.results.append(request_result(0, 8, "sql", "online", "last"))
    log.results.append(request_result(0, 0, "math", "plain", "last", answer="2"))
    for arm, seconds in (("plain", 2.5), ("frozen", 3.0), ("online", 2.1)):
        slow.add(arm, 100, seconds)  # type: ignore[arg-type]
    result = report.summarize(("math", "sql"), log, slow, [], {}, 9.0, 3)
    assert result["last_prompts"] == {"math": 30, "sql": 1}
    assert result["goals"] == {
        "sql_gain": False,  # 8 of 40 against 4 of 40
        "online_faster_than_plain": False,  # 1.19 times
        "online_faster_than_frozen": True,
        "no_failed_request": False,
        "answers_unchanged": False,
    }
    head, *lines = report.goal_lines(result)
    assert "4 of 5 missed" in head
    assert [("met" in line, "missed" in line) for line in lines] == [
        (False, True), (False, True), (True, False), (False, True), (False, True)
    ]  # fmt: skip
    assert "last 1 to 30" in str(report.result_table(result, 3).title)


def test_answers_are_compared_where_all_arms_answered() -> None:
    log = RequestLog(
        [request_result(0, 0, arm=arm, part="last") for arm in ARMS]
        + [request_result(1, 0, arm=arm, part="last", answer=arm) for arm in ARMS]
        + [request_result(2, 0, arm=arm, part="last", answer=arm) for arm in ARMS[:2]]
        + [request_result(0, 0, arm="frozen", part="stream", answer="another part's")]
    )
    assert log.answer_changes() == (2, 1)
    assert RequestLog().answer_changes() == (0, 0)


def test_a_run_that_compared_no_answers_has_not_shown_them_unchanged() -> None:
    result = report.summarize(("sql",), RequestLog(), Throughput(), [], {}, 9.0, 3)
    assert result["goals"]["answers_unchanged"] is False


def test_the_answer_line_is_cut_plain_and_held_for_seconds() -> None:
    assert answer_line(RequestLog(), 60.0) is None
    log = RequestLog(
        [
            request_result(3, 0, answer="first\n\n  [red]line[/red] \x1b[2J" + " more" * 60),
            request_result(6, 0, arm="frozen", answer="frozen"),
            request_result(7, 0, answer="second"),
        ]
    )
    assert answer_line(log, 2.9) is None
    start = "sql    How many? → first [red]line[/red] \N{REPLACEMENT CHARACTER}[2J more"
    for elapsed in (5.0, 9.9):  # the second one has come meanwhile
        line = _text_of(render(("sql",), log, LiveState(elapsed=elapsed)), 60).splitlines()[-1]
        assert line.startswith(start)
        assert len(line) == 60
        assert line.endswith("…")
    assert str(answer_line(log, 10.0)).endswith("→ second")


def _text_of(renderable: RenderableType, width: int = 130) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_labels_at_one_height_are_moved_apart() -> None:
    assert plot.label_shifts([0.8, 0.2]) == [0.0, 0.0]
    assert plot.label_shifts([0.5]) == [0.0]
    for values in ([0.5, 0.5], [0.5, 0.52], [0.52, 0.5], [0.0, 0.0], [0.01, 0.0]):
        up, down = plot.label_shifts(values)
        heights = [v * 190 + shift for v, shift in zip(values, (up, down), strict=True)]
        assert abs(heights[0] - heights[1]) >= 12.9
        assert min(heights) >= -1e-9
        assert (heights[0] > heights[1]) == (values[0] >= values[1])


def test_names_of_short_phases_take_turns_on_two_lines() -> None:
    wide = [("math + code", 0), ("shift: sql + shell", 400), ("mix", 800)]
    assert plot.name_lines(wide, 1000) == [0, 0, 0]
    tight = [("math + code", 0), ("shift: sql + shell", 60), ("mix", 800)]
    assert plot.name_lines(tight, 1000) == [0, 1, 0]


def test_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.png"
    plot.draw(path, ("math", "sql", "shell"), _full_log(), [("a", 0), ("b", 15)], 30)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_live_state_keeps_its_last_value_while_a_part_is_dead() -> None:
    state = LiveState()
    decision = {"topic": "sql", "outcome": "published", "served_expected_acceptance": 0.1,
                "candidate_expected_acceptance": 0.52}  # fmt: skip
    state.update({"weight_versions": {"sql": 3}, "decisions": [decision], "trainer": {}})
    state.update({"weight_versions": {"error": "RayActorError"}, "decisions": {"error": "x"},
                      "trainer": {"error": "RayActorError"}})  # fmt: skip
    assert state.versions == {"sql": 3}
    assert decision_text(state.decisions["sql"]) == "published 0.10 → 0.52"
    assert decision_text(None) == "-"
    assert state.trainer == "restarting"


def test_displays_render_with_and_without_results() -> None:
    log, state = _full_log(), LiveState("mix", 61.0, 330.0, 9.0, 3.6, {"sql": 2})
    log.failures.append(FailedRequest("sql", "online", 2.0, "HTTP 500"))
    text = _text_of(render(("math", "sql", "shell"), log, state))
    assert "failed requests: 1" in text
    assert "1:01 of 5:30" in text
    log.results.sort(key=lambda s: s.part != "stream")  # the last measurement comes last
    log.results.extend(list(log.select(part="last")))
    line = progress_line(("sql", "shell"), log, state)
    assert "sql v2 0.60/0.10, shell v0 -/-" in line
