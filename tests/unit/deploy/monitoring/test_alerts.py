"""Every alert fires on its condition only: synthetic series, rules evaluated by promtool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from paceline.deploy.monitoring import files

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="no promtool here (Debian: prometheus)")

Series = dict[str, str]  # name to values a minute, in promtool's notation

FIRST = 'spec_decode_num_accepted_tokens_per_pos_total{topic="sql",position="0",slot="stable"}'
DRAFTS = 'spec_decode_num_drafts_total{topic="sql",slot="stable"}'
PERMITTED, REQUESTED = "training_permitted", "training_permit_requests_total"
FULL, ROOM = (
    'replay_bytes{topic="sql",split="train"}',
    'replay_capacity_bytes{topic="sql",split="train"}',
)
OK, FAILED = 'requests_total{outcome="ok"}', 'requests_total{outcome="failed"}'
OVERLOADED = 'requests_total{outcome="overloaded"}'
ROLLED_BACK = 'weight_updates_total{draft="sql",outcome="rolled_back"}'
TRAINER, PREEMPTED = 'trainer_state{state="training"}', "trainers_preempted"
WANTED = "trainers_wanted"
CONNECTED = 'expert_connected{draft="sql"}'
DRAFT_FAILURES = 'draft_failures_total{replica="r"}'
WELL: Series = {
    # synthetic records fill their capacity
    'replay_bytes{topic="sql",split="synthetic"}': "100x240",
    'replay_capacity_bytes{topic="sql",split="synthetic"}': "100x240",
    FIRST: "0+480x240",
    DRAFTS: "0+600x240",
    "plain_decode_seconds_total": "0+50x240",
    "decode_seconds_total": "0+30x240",
    ROLLED_BACK: "0x240",
    FULL: "50x240",
    ROOM: "100x240",
    PERMITTED: "1x240",
    REQUESTED: "0+500x240",
    "trainer_failures_total": "0x240",
    TRAINER: "1x240",
    PREEMPTED: "0x240",
    WANTED: "1x240",
    "replay_inserted_total": "0+90x240",
    CONNECTED: "1x240",
    DRAFT_FAILURES: "0x240",
    "num_requests_waiting": "1x240",
    "num_requests_running": "4x240",
    OK: "0+100x240",
    FAILED: "0x240",
    OVERLOADED: "0+10x240",
}
SICK: dict[str, Series] = {
    "PacelineAcceptanceCollapse": {FIRST: "0+480x120 57660+60x120"},
    "PacelineSpeculationSlower": {"plain_decode_seconds_total": "0+25x240"},
    "PacelineRollbackStorm": {ROLLED_BACK: "0x120 1+1x120"},
    "PacelineReplayShardFull": {FULL: "99x240"},
    "PacelineTrainerStarving": {PERMITTED: "0x240"},
    "PacelineTrainerFailing": {"trainer_failures_total": "0x120 1+1x120"},
    "PacelineTrainerGone": {TRAINER: "1x30"},
    "PacelineExpertAway": {CONNECTED: "1x120 0x120"},
    "PacelineDraftFailures": {DRAFT_FAILURES: "0x120 1+1x120"},
    "PacelineTargetQueue": {"num_requests_waiting": "3x240"},
    "PacelineRequestsFail": {FAILED: "0x120 5+5x120"},
    "PacelineRequestsRefused": {OK: "0+100x120 12000x120", OVERLOADED: "0x120 100+100x120"},
}
# No alert may fire.
FINE: dict[str, Series] = {
    "all is well": {},
    "no traffic": dict.fromkeys(WELL, "0x240")
    | {ROOM: "100x240", PERMITTED: "1x240", CONNECTED: "1x240"},
    "training is off beside a busy target": {PERMITTED: "0x240", REQUESTED: "0x240"},
    "training was never on": {
        TRAINER: "_x240",
        WANTED: "0x240",
        PERMITTED: "_x240",
        REQUESTED: "_x240",
    },
    "training is switched off by a restart": {TRAINER: "1x145", WANTED: "1x145 0x95"},
    "the trainer made room for a replica": {TRAINER: "1x130", PREEMPTED: "0x130 1x110"},
    "a trainer that starts again": {TRAINER: "1x144 _x3 1x93"},
    "the server was stopped": dict.fromkeys(WELL, "_x240") | {TRAINER: "1x130"},
    "drafts beside the target": {CONNECTED: "_x240"},
    "a topic that is new": {FIRST: "_x150 0+480x90", DRAFTS: "_x150 0+600x90"},
    "a rollback or two": {ROLLED_BACK: "0x130 2x110"},
    "a burst that has gone": {"num_requests_waiting": "0x150 9x3 0x87"},
}


def firing(series: Series, folder: Path, expected: set[str]) -> subprocess.CompletedProcess[str]:
    """Run promtool: these alerts, and no others, must fire after two and a half hours."""
    all_alerts = sorted(SICK)
    tests = [
        {
            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
            "eval_time": "150m",
            "exp_samples": [{"labels": "{}", "value": 1}] if name in expected else [],
        }
        for name in all_alerts
    ]
    given = [{"series": f"ray_paceline_{name}", "values": v} for name, v in series.items()]
    group = {"interval": "1m", "input_series": given, "promql_expr_test": tests}
    suite = {"rule_files": [str(files.ALERTS)], "evaluation_interval": "1m", "tests": [group]}
    file = folder / "suite.yml"
    file.write_text(yaml.safe_dump(suite))
    command = [str(PROMTOOL), "test", "rules", str(file)]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_alert_has_its_case() -> None:
    groups = yaml.safe_load(files.ALERTS.read_text())["groups"]
    assert set(SICK) == {r["alert"] for group in groups for r in group["rules"] if "alert" in r}


@pytest.mark.parametrize("alert", sorted(SICK))
def test_an_alert_fires_alone_on_its_condition(alert: str, tmp_path: Path) -> None:
    result = firing(WELL | SICK[alert], tmp_path, {alert})
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("case", sorted(FINE))
def test_no_alert_fires_without_its_condition(case: str, tmp_path: Path) -> None:
    result = firing(WELL | FINE[case], tmp_path, set())
    assert result.returncode == 0, result.stdout + result.stderr
