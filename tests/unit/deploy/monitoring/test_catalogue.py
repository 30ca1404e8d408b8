"""Catalogue, dashboard, alert rules and docs have the same metrics."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.deploy.cli.main import main
from paceline.deploy.monitoring import files
from paceline.deploy.monitoring.catalogue import BY_NAME, METRICS, PARTS, Kind, markdown

ROOT = Path(__file__).parents[4]
DASHBOARD = json.loads(files.DASHBOARD.read_text(encoding="utf-8"))
SERVE_LABELS = {"application", "deployment", "replica"}
SERIES = {name: metric for metric in METRICS for name in metric.series}
# Pool only: a panel would be empty with colocated drafts.
NOT_SHOWN = {"expert_requests"}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(files.ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_expressions() -> list[str]:
    panels = [target["expr"] for p in DASHBOARD["panels"] for target in p.get("targets", ())]
    notes = [note["expr"] for note in DASHBOARD["annotations"]["list"]]
    variables = [v["definition"] for v in DASHBOARD["templating"]["list"] if "definition" in v]
    return panels + notes + variables


def expressions() -> list[str]:
    return [*dashboard_expressions(), *(rule["expr"] for rule in rules())]


def test_names_are_unique_and_labels_differ_from_serve_s() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]+", metric.name)
        assert not metric.name.endswith("_total")  # the export appends it
        assert not set(metric.labels) & (SERVE_LABELS | {"le", "route"})
        assert metric.part in PARTS
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help
        assert not metric.help.endswith(".")


def test_no_counter_has_a_label_with_unbounded_values() -> None:
    """The node's agent keeps a counter's series for ever; a gauge's expires."""
    unbounded = {m.name for m in METRICS if "weight_version" in m.labels}
    assert unbounded
    assert {BY_NAME[name].kind for name in unbounded} == {Kind.GAUGE}


@pytest.mark.parametrize("expression", expressions())
def test_queried_metrics_are_exported(expression: str) -> None:
    names = re.findall(r"\bray_[a-z0-9_]+", expression)
    assert names or "paceline:" in expression
    assert [name for name in names if name not in SERIES] == []
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert set(re.findall(r"\bpaceline:[a-z0-9_:]+", expression)) <= recorded


@pytest.mark.parametrize("expression", expressions())
def test_queried_labels_exist(expression: str) -> None:
    names = set(re.findall(r"\bray_[a-z0-9_]+", expression))
    known = {label for name in names for label in SERIES[name].labels} | SERVE_LABELS | {"le"}
    asked = set(re.findall(r'([a-z_]+)(?:=~|!=|=)"', expression))
    for group in re.findall(r"\bby \(([^)]*)\)", expression):
        asked |= {label.strip() for label in group.split(",")}
    assert asked <= known


def test_every_metric_has_a_panel_or_an_alert() -> None:
    asked = {name for e in expressions() for name in re.findall(r"\bray_[a-z0-9_]+", e)}
    assert {m.name for m in METRICS if not asked & set(m.series)} == NOT_SHOWN


def test_every_metric_and_alert_is_documented() -> None:
    described = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert described == markdown(), "python -m paceline.deploy.monitoring.catalogue"
    for metric in METRICS:
        assert f"`{metric.series[0].removesuffix('_bucket')}`" in described
    documented = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert alerts == set(re.findall(r"`(Paceline[A-Za-z]+)`", documented))


def test_alerts_end_with_their_threshold_and_have_texts() -> None:
    for rule in (rule for rule in rules() if "alert" in rule):
        assert re.search(r"\s[<>] [0-9.]+$", rule["expr"].strip()), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_every_panel_has_a_title_a_unit_and_queries_with_legends() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len({panel["title"] for panel in panels}) == len(panels) > 30
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in {"short", "percentunit", "s", "reqps"}
        assert panel["datasource"] == source
        assert [target["refId"] for target in panel["targets"]] == sorted(
            {target["refId"] for target in panel["targets"]}
        )
        for target in panel["targets"]:
            assert target["legendFormat"]
            assert target["datasource"] == source
            labels = set(re.findall(r"{{([a-z_]+)}}", target["legendFormat"]))
            groups = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            assert labels <= {label.strip() for group in groups for label in group.split(",")}


def test_counters_are_queried_as_rates_and_gauges_are_not() -> None:
    for expression in expressions():
        for name in re.findall(r"\bray_[a-z0-9_]+", expression):
            counts = SERIES[name].kind is not Kind.GAUGE
            assert counts == bool(re.search(rf"(rate|increase)\({name}\b", expression)), expression


def test_panels_do_not_overlap_and_have_unique_ids() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells
        assert at["x"] + at["w"] <= 24
        cells |= own


def test_promtool_accepts_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here (Debian: prometheus)")
    result = subprocess.run(
        [promtool, "check", "rules", str(files.ALERTS)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_accepts_the_written_config(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here (Debian: prometheus)")
    (tmp_path / "prom_metrics_service_discovery.json").write_text("[]")
    files.write(tmp_path / "out", tmp_path)
    command = [promtool, "check", "config", str(tmp_path / "out" / "prometheus.yml")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_command_writes_files_that_point_at_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "here"
    assert main(["monitoring", str(out), "--ray-dir", str(tmp_path / "ray")]) == 0
    config = yaml.safe_load((out / "prometheus.yml").read_text())
    assert [Path(file).is_file() for file in config["rule_files"]] == [True]
    source = yaml.safe_load((out / "grafana/provisioning/datasources/paceline.yml").read_text())
    assert source["datasources"][0]["type"] == "prometheus"
    providers = yaml.safe_load((out / "grafana/provisioning/dashboards/paceline.yml").read_text())
    paths = {p["name"]: Path(p["options"]["path"]) for p in providers["providers"]}
    assert json.loads((paths["Paceline"] / "paceline.json").read_text())["uid"] == "paceline"
    assert paths["Ray"].is_relative_to(tmp_path / "ray")
    assert str(out / "prometheus.yml") in capsys.readouterr().out
    ini = configparser.ConfigParser()
    ini.read(out / "grafana" / "grafana.ini")
    assert Path(ini["paths"]["provisioning"]) == out / "grafana" / "provisioning"
    for name in ("data", "logs", "plugins"):  # its home is read-only
        assert Path(ini["paths"][name]).is_relative_to(out / "grafana")
    assert ini["server"]["http_addr"] == "127.0.0.1"
    assert ini["security"].getboolean("allow_embedding")
    assert ini["auth.anonymous"]["org_role"] == "Viewer"


def test_a_folder_that_cannot_be_created_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["monitoring", str(tmp_path / "file" / "out")]) == 2
    assert "file/out" in capsys.readouterr().err
