"""Settings of the replicas of target and ingress, from the configuration."""

from __future__ import annotations

import os

from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pool.settings import ExpertSettings
from paceline.deploy.api.auth import api_keys
from paceline.deploy.api.failover import FailoverPolicy
from paceline.deploy.api.ingress import IngressSettings
from paceline.deploy.api.topic_admin import TopicAdminSettings
from paceline.deploy.config.config import PacelineConfig
from paceline.deploy.config.preflight import router_confidence


def ingress_settings(config: PacelineConfig, no_topics: str | None = None) -> IngressSettings:
    """Settings of an ingress replica.

    Args:
        config: see PacelineConfig; API keys are read from the environment of this process.
        no_topics: why no topic can be added while it runs; None if the config decides.
    """
    confidence = router_confidence(config)
    return IngressSettings(
        model_name=config.model_name,
        model_path=str(config.target_path),
        max_model_len=config.target.max_model_len,
        experts=config.experts,
        router_timeout_s=config.router.timeout_s,
        min_confidence=confidence,
        max_in_flight=_in_flight(config),
        failover=FailoverPolicy(
            stall_timeout_s=config.target.stall_timeout_s,
            failover_timeout_s=config.target.failover_timeout_s,
        ),
        max_seqs_per_client=_per_client(config),
        request_timeout_s=config.target.request_timeout_s,
        canary_share=config.training.effective_canary_share,
        topics=TopicAdminSettings(
            mutable=config.topics.mutable,
            restart_reason=no_topics or topic_refusal(config),
            min_confidence=confidence,
        ),
        api_keys=api_keys(config.auth, os.environ),
        key_cache=config.target.prefix_cache == "key",
        key_scope=config.replay.scope == "key",
        records=config.replay.enabled,
        in_process_router=_in_process_router(config),
        ui=config.ui.enabled,
        operations=config.operations.enabled,
        generation_config=config.target.generation_config == "auto",
        cors_origins=config.ingress.cors_origins,
        metrics=config.ingress.metrics,
    )


def router_arguments(config: PacelineConfig) -> tuple[str, str | None, int]:
    """Folders of the classifier and its encoder, and the number of threads."""
    encoder = config.encoder_path
    return (
        str(config.router_path),
        None if encoder is None else str(encoder),
        config.router.num_threads,
    )


def _in_process_router(config: PacelineConfig) -> tuple[str, str | None, int] | None:
    """The classifier in the ingress process, or None."""
    if not config.router.enabled or config.router.placement != "ingress":
        return None
    return router_arguments(config)


def _in_flight(config: PacelineConfig) -> int:
    """Most concurrent sequences of an ingress replica: its share of the target's."""
    target = config.target
    total = target.most_replicas * target.max_num_seqs + target.max_queued_requests
    return -(-total // config.ingress.num_replicas)


def _per_client(config: PacelineConfig) -> int | None:
    """Most concurrent sequences of a client at an ingress replica: its share."""
    most = config.target.max_seqs_per_client
    return None if most is None else -(-most // config.ingress.num_replicas)


def target_settings(config: PacelineConfig, num_gpus: float = 1.0) -> TargetSettings:
    """Settings of a target replica that books so many GPUs."""
    tokens = config.drafts.num_speculative_tokens
    return TargetSettings(
        model_path=str(config.target_path),
        drafts={name: str(path) for name, path in config.draft_paths.items()},
        dtype=config.target.dtype,
        device=config.target.device,
        gpu_share=min(num_gpus, 1.0),
        num_threads=config.target.num_threads,
        max_num_seqs=config.target.max_num_seqs,
        max_model_len=config.target.max_model_len,
        kv_cache_mb=config.target.kv_cache_mb,
        num_speculative_tokens=None if tokens == "auto" else tokens,
        max_speculative_tokens=config.drafts.max_speculative_tokens,
        draft_top_k=config.drafts.top_k,
        replay_top_k=config.replay.top_k,
        replay_branches=config.training.enabled and config.training.objective.needs_branches,
        prefill_chunk=config.target.prefill_chunk,
        prefix_cache=config.target.prefix_cache is not False,
        numerics=config.target.numerics,
        cuda_graphs=config.target.cuda_graphs,
        placement=config.drafts.placement if config.experts else "colocated",  # no pool of none
        round_timeout_ms=config.drafts.round_timeout_ms,
        stall_timeout_s=config.target.stall_timeout_s,
        stream_chunks_per_s=config.target.stream_chunks_per_s,
        sample_share=config.router.sample_share,
        held_out_fraction=config.replay.held_out_fraction,
        canary_share=config.training.effective_canary_share,
        suffix=config.drafts.suffix,
        retention_s=config.replay.retention_hours * 3600.0,
    )


def expert_settings(config: PacelineConfig, target: TargetSettings, expert: str) -> ExpertSettings:
    """Settings of a pool's expert that drafts for replicas with ``target``'s settings."""
    return ExpertSettings(
        expert=expert,
        target=target,
        max_sequences=config.target.max_num_seqs * config.target.most_replicas,
        other_cores=(config.drafts.pool_processes - 1) * config.drafts.num_threads,
        device=config.target.device if config.drafts.num_gpus else "cpu",
        gpu_share=config.drafts.num_gpus,
        num_threads=config.drafts.num_threads,
        draft_ahead=config.drafts.draft_ahead,
        across_nodes=config.drafts.across_nodes,
        autoscaled=config.drafts.autoscaling is not None,
    )


def topic_refusal(config: PacelineConfig) -> str | None:
    """Reason why no topic can be added while the server runs; None if one can."""
    if not config.experts:
        return (
            "This server has no drafts (drafts.general is none), and a topic starts with a copy "
            "of general's: set drafts.general and start the server again."
        )
    if config.replay.scope == "key":
        return (
            "Every key has experts of its own (replay.scope): name the topic in drafts.topics and "
            "start the server again."
        )
    if config.drafts.placement == "pool" and config.drafts.num_gpus > 0:
        return (
            "The GPUs are shared out among the target and the experts of the pool when the server "
            "starts, and there is no part left for another one: name the topic in drafts.topics "
            "and start the server again."
        )
    return None
