"""What is refused before any process starts: quick, and without torch or Ray."""

from __future__ import annotations

import socket

from paceline.actors.decoding.compatibility import ModelError, check_models, read_config
from paceline.deploy.config import PacelineConfig
from paceline.deploy.errors import ConfigError


def check(config: PacelineConfig) -> None:
    """Refuse models that are missing or do not fit together, and a port that is taken.

    Raises:
        ConfigError: one line that says what is wrong.
    """
    try:
        check_models(config.target_path, config.draft_paths)
        if config.router.enabled:
            read_config(config.router_path, "router")
    except ModelError as error:
        raise ConfigError(str(error)) from error
    _check_port(config.host, config.port)


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"port: cannot listen on {host}:{port} ({reason})") from error
