"""The files that Prometheus and Grafana start from, beside what Ray writes for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from paceline.deploy.errors import ConfigError
from paceline.deploy.monitoring import dashboard

ALERTS = Path(__file__).parent / "alerts.yml"
_EVERY = "10s"
_PROMETHEUS, _GRAFANA = "http://127.0.0.1:9090", "127.0.0.1"


def ray_folder() -> Path:
    """Where Ray keeps its sessions on this machine, unless it is told otherwise."""
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"


def prometheus_config(rules: Path, ray: Path) -> dict[str, Any]:
    """Ray's own scrape config, and the alert rules.

    Args:
        rules: the rule file.
        ray: Ray's folder; its dashboard lists there what is to be scraped, session by session.
    """
    targets = ray / "prom_metrics_service_discovery.json"
    return {
        "global": {"scrape_interval": _EVERY, "evaluation_interval": _EVERY},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [str(targets)]}]}],
    }


def grafana_providers(dashboards: Path, ray: Path) -> dict[str, Any]:
    """Two folders of dashboards: Paceline's and the ones that Ray writes for its latest session."""
    folders = {"Paceline": dashboards, "Ray": ray / "session_latest/metrics/grafana/dashboards"}
    return {
        "apiVersion": 1,
        "providers": [
            {"name": name, "folder": name, "type": "file", "options": {"path": str(path)}}
            for name, path in folders.items()
        ],
    }


def grafana_source() -> dict[str, Any]:
    """Prometheus on this machine."""
    source = {"name": "Prometheus", "type": "prometheus", "url": _PROMETHEUS}
    more = {"access": "proxy", "isDefault": True, "jsonData": {"timeInterval": _EVERY}}
    return {"apiVersion": 1, "datasources": [source | more]}


def grafana_ini(own: Path, provisioning: Path) -> str:
    """Grafana's settings: on this machine, with all that it writes below ``own``.

    Ray's dashboard shows its panels in frames of its own page, without a login; so nobody needs
    one to look at them, and nobody may change any.
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
    """Write all of it into a folder; files of an earlier time are replaced.

    Args:
        out: the folder, made where it is not there.
        ray: Ray's folder, see :func:`ray_folder`.

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
        dashboards / "paceline.json": dashboard.text(),
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
