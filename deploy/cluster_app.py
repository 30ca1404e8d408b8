"""The application on an existing Ray cluster, built by ``serve deploy``.

No ``from __future__ import annotations`` here: Serve reads the annotations of what it calls.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve

from paceline.cluster.placement import actor_options
from paceline.cluster.supervisor import Supervisor
from paceline.deploy import learning
from paceline.deploy.api.auth import api_keys
from paceline.deploy.app import build_app
from paceline.deploy.config.config import PacelineConfig
from paceline.deploy.config.preflight import (
    check_keys,
    check_models_fit,
    unauthenticated_warning,
)
from paceline.deploy.config.sections import AUTO
from paceline.deploy.draft_store import share_draft, with_draft
from paceline.deploy.errors import ConfigError

logger = logging.getLogger(__name__)

_ROLES_WITH_COMPUTED_GPUS = ("target", "trainer")
_TARGET_DRAIN_TIMEOUT_S, _INGRESS_DRAIN_TIMEOUT_S = 30.0, 60.0
_NO_TOPICS = (
    "On a cluster topics come from the configuration: name the topic in drafts.topics and deploy "
    "the application again."
)


def build(config: PacelineConfig) -> serve.Application:
    """The application for ``import_path: paceline.deploy.cluster_app:build``.

    A supervisor, a deployment of its own, starts the learning actors; the others find them by
    their names. Models are read, under the same paths, by every host that runs a part; the draft
    of ``drafts.general: auto`` from the storage.

    Args:
        config: the ``args`` of the application in Serve's config file. ``ray`` is ignored: ``ray
            start`` sets it.

    Raises:
        ConfigError: shown by ``serve status``.
    """
    config = for_cluster(config)
    if config.drafts.general == AUTO and config.target_path.is_dir():
        config = share_draft(with_draft(config, config.target_path, logger.info))
    check_keys(config)
    check_models_fit(config)
    learning.remove_stray_records(config)
    actors = learning.named_actors(config)
    keyed = bool(api_keys(config.auth, os.environ))
    supervisor = serve.deployment(
        name="supervisor",
        ray_actor_options=actor_options(config.placement.learning),
        health_check_period_s=5,
        health_check_timeout_s=20,
        graceful_shutdown_timeout_s=1,
        graceful_shutdown_wait_loop_s=0.2,
    )(Supervisor).bind(
        learning.factories(config),
        learning.trainer_factories(config),
        learning.trainer_booking(config),
        actors.scheduler,
        unauthenticated_warning(config.host, config.auth.api_keys_env, keyed=keyed),
    )
    actors = replace(actors, supervisor=supervisor)
    return build_app(config, actors, (config.host, config.port), no_topics=_NO_TOPICS)


def for_cluster(config: PacelineConfig) -> PacelineConfig:
    """The config for several hosts: experts on TCP, no computed GPUs, longer drain timeouts.

    Raises:
        ConfigError: there is no storage that every host sees.
    """
    storage = config.weights.storage
    if storage is None or not Path(storage).is_absolute():
        raise ConfigError(
            "weights.storage: on a cluster it must be the absolute path of a folder that every "
            "host sees"
        )
    placement: dict[str, Any] = config.placement.model_dump()
    for role in _ROLES_WITH_COMPUTED_GPUS:
        placement[role].setdefault("GPU", 0.0)
    target_s = config.target.drain_timeout_s or _TARGET_DRAIN_TIMEOUT_S
    ingress_s = config.ingress.drain_timeout_s or _INGRESS_DRAIN_TIMEOUT_S
    return config.model_copy(
        update={
            "target": config.target.model_copy(update={"drain_timeout_s": target_s}),
            "ingress": config.ingress.model_copy(update={"drain_timeout_s": ingress_s}),
            "drafts": config.drafts.model_copy(update={"across_nodes": True}),
            "placement": type(config.placement)(**placement),
        }
    )
