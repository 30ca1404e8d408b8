"""Configuration files for Prometheus and Grafana, in addition to those that Ray writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from paceline.deploy.errors import ConfigError

ALERTS = Path(__file__).with_name("alerts.yml")
DASHBOARD = Path(__file__).with_name("paceline.json")
_EVERY = "10s"
_PROMETHEUS, _GRAFANA = "http://127.0.0.1:9090", "127.0.0.1"


def ray_folder() -> Path:
    """Folder of Ray's sessions on this machine."""
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"


def prometheus_config(rules: Path, ray: Path) -> dict[str, Any]:
    """Ray's scrape config with the alert rules.

    Args:
        rules: the rule file.
        ray: Ray's folder; its dashboard lists the scrape targets of the latest session there.
    """
    targets = ray / "prom_metrics_service_discovery.json"
    return {
        "global": {"scrape_interval": _EVERY, "evaluation_interval": _EVERY},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [str(targets)]}]}],
    }


def grafana_providers(dashboards: Path, ray: Path) -> dict[str, Any]:
    """Two folders of dashboards: Paceline's, and those that Ray writes for its latest session."""
    folders = {"Paceline": dashboards, "Ray": ray / "session_latest/metrics/grafana/dashboards"}
    return {
        "apiVersion": 1,
        "providers": [
            {"name": name, "folder": name, "type": "file", "options": {"path": str(path)}}
            for name, path in folders.items()
        ],
    }


def grafana_source() -> dict[str, Any]:
    """Prometheus on this machine as data source."""
    source = {"name": "Prometheus", "type": "prometheus", "url": _PROMETHEUS}
    more = {"access": "proxy", "isDefault": True, "jsonData": {"timeInterval": _EVERY}}
    return {"apiVersion": 1, "datasources": [source | more]}


def grafana_ini(own: Path, provisioning: Path) -> str:
    """Grafana's settings: listens on loopback, writes below ``own``.

    Ray's dashboard embeds the panels in its page, so they are readable without a login. Nothing is
    editable.
    """
    sections: dict[str, dict[str, object]] = {
        "server": {"http_addr": _GRAFANA},
        "paths": {
            "provisioning": provisioning,
            "data": own / "data",
            "logs": own / "log",
            "plugins": own / "plugins",
        },
        "security": {"allow_embedding": "true"},
        "auth.anonymous": {"enabled": "true", "org_role": "Viewer"},
    }
    return "\n".join(
        f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
        for section, keys in sections.items()
    )


def write(out: Path, ray: Path) -> list[Path]:
    """Write all files into a folder, over existing ones.

    Args:
        out: the folder, created if missing.
        ray: see :func:`ray_folder`.

    Returns:
        the files.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    out, ray = out.absolute(), ray.absolute()
    grafana = out / "grafana"
    rules, dashboards, given = out / "alerts.yml", grafana / "dashboards", grafana / "provisioning"
    texts = {
        rules: ALERTS.read_text(encoding="utf-8"),
        out / "prometheus.yml": _yaml(prometheus_config(rules, ray)),
        dashboards / "paceline.json": DASHBOARD.read_text(encoding="utf-8"),
        given / "dashboards" / "paceline.yml": _yaml(grafana_providers(dashboards, ray)),
        given / "datasources" / "paceline.yml": _yaml(grafana_source()),
        grafana / "grafana.ini": grafana_ini(grafana, given),
    }
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror or error}") from error
    return list(texts)


def _yaml(data: dict[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False)
