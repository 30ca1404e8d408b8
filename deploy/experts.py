"""The pool: every expert a Serve deployment of its own.

No ``from __future__ import annotations`` here: Ray reads the annotations of what it wraps.
"""

from typing import Any

from ray import serve

from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pool.settings import ExpertSettings
from paceline.cluster.autoscaling import replica_options
from paceline.cluster.placement import actor_options
from paceline.deploy.config.config import PacelineConfig

_PREFIX = "expert-"
# By name: the driver then need not import torch and transformers.
_EXPERT_CLASS: Any = "paceline.actors.speculation.pool.replica.ExpertReplica"
# SessionManager are requests that last as long as their target; their number must not be capped.
_UNBOUNDED = 100_000


def deployments(
    config: PacelineConfig, target: TargetSettings, registry: Any
) -> dict[str, serve.Application]:
    """Expert to its deployment; empty where drafts are colocated.

    Args:
        config: see PacelineConfig.
        target: settings of the targets that the experts draft for.
        registry: actor handle of the weight registry.
    """
    if config.drafts.placement != "pool":
        return {}
    return {
        expert: _deployment(config, expert).bind(_settings(config, target, expert), registry)
        for expert in config.drafts.experts
    }


def deployment_name(expert: str) -> str:
    """The name of an expert's deployment."""
    return _PREFIX + expert


def pool_gpus(config: PacelineConfig) -> float:
    """GPUs that all experts of a pool take together."""
    return config.drafts.num_gpus * config.drafts.pool_processes


def _settings(config: PacelineConfig, target: TargetSettings, expert: str) -> ExpertSettings:
    return ExpertSettings(
        expert=expert,
        target=target,
        max_sequences=config.target.max_num_seqs * config.target.most_replicas,
        target_cores=target.num_threads * config.target.most_replicas,
        other_cores=(config.drafts.pool_processes - 1) * config.drafts.num_threads,
        device=config.target.device if config.drafts.num_gpus else "cpu",
        num_threads=config.drafts.num_threads,
        draft_ahead=config.drafts.draft_ahead,
        across_nodes=config.drafts.across_nodes,
        autoscaled=config.drafts.autoscaling is not None,
    )


def _deployment(config: PacelineConfig, expert: str) -> serve.Deployment:
    return serve.deployment(
        name=deployment_name(expert),
        **replica_options(config.drafts.num_replicas, config.drafts.autoscaling),
        max_ongoing_requests=_UNBOUNDED,
        ray_actor_options=actor_options(config.placement.experts, config.drafts.num_gpus),
        # A session ends only with its target: there is nothing to wait for.
        graceful_shutdown_timeout_s=1,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        health_check_timeout_s=20,
    )(_EXPERT_CLASS)
