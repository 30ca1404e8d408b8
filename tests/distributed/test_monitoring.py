"""Every panel and rule on a real Prometheus while drafts learn from real traffic."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from fixture_models import SMALL_MODELS
from free_ports import find_port

from paceline.deploy.config.config import load_config
from paceline.deploy.demo.prompts import generate
from paceline.deploy.monitoring import files

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here (Debian: prometheus)"),
]

TOPICS = ("sql", "math")
EVERY, WINDOW = "2s", "1m"
LEARNT_WITHIN_S = 360.0


@dataclass(frozen=True)
class Scraped:
    """A running application, its traffic, and a Prometheus that scrapes it."""

    prometheus: httpx.Client
    began: float

    def ask(self, path: str, **what: Any) -> Any:
        answer = self.prometheus.get(f"/api/v1/{path}", params=what)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def values(self, expression: str) -> list[float]:
        """Of all its series, since the start; raises where Prometheus does not take it."""
        now = time.time()
        data = self.ask("query_range", query=expression, start=self.began, end=now, step=EVERY)
        found = [float(value) for series in data["result"] for _, value in series["values"]]
        return [value for value in found if math.isfinite(value)]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The small models with fast learning, and Ray's dashboard with its scrape targets."""
    from paceline.deploy import app

    config = load_config(
        None,
        {
            **SMALL_MODELS,
            "port": find_port(),
            "state_dir": str(tmp_path_factory.mktemp("state")),
            "target.num_threads": 1,
            "target.max_num_seqs": 4,
            "drafts.topics": TOPICS,
            "router.sample_share": 1.0,
            "replay.held_out_fraction": 0.4,
            "training.canary_share": 0.5,
            "training.round_seconds": 2.0,
            "ray.num_cpus": 2,
            "ray.dashboard_port": find_port(),
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", "1000")
        with app.start(config) as running:
            yield running.base_url


@pytest.fixture(scope="module")
def traffic(base_url: str) -> Iterator[list[int]]:
    """Prompts of two topics, repeated, whole and streamed; yields the HTTP statuses."""
    ended, statuses = threading.Event(), []
    lists = [generate(topic, 300, 0) for topic in TOPICS]
    prompts = [text for pair in zip(*lists, strict=True) for text in pair]

    def send(number: int) -> None:
        with httpx.Client(base_url=base_url, timeout=120) as http:
            for text in itertools.islice(itertools.cycle(prompts), number, None, 3):
                if ended.is_set():
                    return
                body = {"model": "paceline", "messages": [{"role": "user", "content": text}]}
                body |= {"max_tokens": 40, "temperature": 0, "stream": bool(number)}
                statuses.append(http.post("/v1/chat/completions", json=body).status_code)
                ended.wait(0.3)  # the trainer's turn

    with ThreadPoolExecutor(2) as clients:
        try:
            jobs = [clients.submit(send, number) for number in range(2)]
            yield statuses
        finally:
            ended.set()
        for job in jobs:
            job.result()


@pytest.fixture(scope="module")
def scraped(
    traffic: list[int],  # noqa: ARG001 - it has to flow
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scraped]:
    """Prometheus with Ray's generated config and our rules, at a short interval."""
    assert PROMETHEUS is not None
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    generated = session / "metrics" / "prometheus" / "prometheus.yml"
    deadline = time.monotonic() + 60
    while not generated.is_file():
        assert time.monotonic() < deadline, "Ray's dashboard wrote no scrape config"
        time.sleep(0.2)
    home = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load(generated.read_text())
    rules = yaml.safe_load(files.ALERTS.read_text())
    rules["groups"][0]["interval"] = EVERY
    (home / "alerts.yml").write_text(yaml.safe_dump(rules))
    config["global"] = {"scrape_interval": EVERY, "evaluation_interval": EVERY}
    config["rule_files"] = [str(home / "alerts.yml")]
    (home / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{find_port()}"
    command = [PROMETHEUS, f"--config.file={home}/prometheus.yml"]
    command += [f"--storage.tsdb.path={home}/data", f"--web.listen-address={address}"]
    began = time.time()
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
                until_ready(client, process, home / "log")
                yield Scraped(client, began)
        finally:
            process.terminate()
            process.wait(30)


def until_ready(client: httpx.Client, process: Any, log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if client.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def panel_expressions() -> dict[str, str]:
    """Grafana's query per panel and line, for all topics."""
    shown = json.loads(files.DASHBOARD.read_text(encoding="utf-8"))
    asked = {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in shown["panels"]
        for target in panel.get("targets", ())
    }
    asked |= {note["name"]: note["expr"] for note in shown["annotations"]["list"]}
    return {
        name: text.replace("$__rate_interval", WINDOW).replace("$topic", ".*")
        for name, text in asked.items()
    }


def rule_expressions() -> dict[str, str]:
    """Expression per rule, without the threshold: a rule that does not fire must have data too."""
    groups = yaml.safe_load(files.ALERTS.read_text())["groups"]
    return {
        rule.get("alert", rule.get("record")): re.sub(r"\s[<>] [0-9.]+$", "", rule["expr"].strip())
        for group in groups
        for rule in group["rules"]
    }


def test_every_panel_and_rule_has_data(scraped: Scraped, traffic: list[int]) -> None:
    left = panel_expressions() | rule_expressions()
    del left["Vocabulary coverage: {{draft}}"]  # of EAGLE drafts, which are none here
    assert len(left) > 60
    assert scraped.values("ray_paceline_no_such_metric") == []
    deadline = time.monotonic() + LEARNT_WITHIN_S
    while left:  # some need a gate's decision, or experts that were scored
        left = {name: text for name, text in left.items() if not scraped.values(text)}
        assert not left or time.monotonic() < deadline, left
        time.sleep(2)
    assert set(traffic) == {200}


def test_rules_are_loaded_and_none_has_an_error(scraped: Scraped) -> None:
    groups = scraped.ask("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(rules) == set(rule_expressions())
    assert {
        name: rule.get("lastError") for name, rule in rules.items() if rule.get("lastError")
    } == {}
    firing = {name for name, rule in rules.items() if rule.get("state") == "firing"}
    assert "PacelineRequestsFail" not in firing


def test_values_are_plausible(scraped: Scraped) -> None:
    asked = panel_expressions()
    shares = [name for name in asked if name.startswith(("Acceptance by topic", "Table usage"))]
    assert len(shares) >= 2
    for name in shares:
        values = scraped.values(asked[name])
        assert values, name
        assert all(0.0 <= value <= 1.0 for value in values), name
    lengths = scraped.values(asked["Mean acceptance length: {{topic}}"])
    assert lengths
    assert all(value >= 1.0 for value in lengths)
    speed = scraped.values(asked["Speed-up against plain decoding: speed-up"])
    assert speed
    assert all(0.1 < value < 10.0 for value in speed)


def test_our_config_scrapes_the_same_targets_as_ray_s(scraped: Scraped) -> None:
    own = files.prometheus_config(Path("alerts.yml"), files.ray_folder())
    [follows] = own["scrape_configs"][0]["file_sd_configs"][0]["files"]
    targets = yaml.safe_load(Path(follows).read_text())[0]["targets"]
    up = {target["labels"]["instance"] for target in scraped.ask("targets")["activeTargets"]}
    assert set(targets) <= up
