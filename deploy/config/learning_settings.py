"""Settings of shards, trainers, scorer and synthetic records, from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from paceline.actors.cores import default_threads
from paceline.actors.general import GENERAL
from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.training.settings import ScorerSettings
from paceline.actors.training.synthetic.answers import SyntheticSettings
from paceline.actors.weights.state_folder import fingerprints
from paceline.deploy.config.config import PacelineConfig

if TYPE_CHECKING:
    from paceline.actors.training.settings import TrainerSettings

_LIGHT_LOAD, _OTHER_CORES = 0.25, 1
_SYNTHETIC_AT_ONCE = 4
_ROUTING_STATE = "routing.json"  # below the state folder
_MEBIBYTE = 2**20
_HOUR_S = 3600.0


def replay_settings(config: PacelineConfig) -> ReplaySettings:
    """Settings of a replay shard."""
    return ReplaySettings(
        capacity_bytes=config.replay.capacity_mb * _MEBIBYTE,
        retention_s=config.replay.retention_hours * _HOUR_S,
        remover=config.replay.remover,
        sampler=config.replay.sampler,
        held_out_fraction=config.replay.held_out_fraction,
        synthetic_per_record=config.training.synthetic_per_record,
    )


def trainer_settings(config: PacelineConfig) -> TrainerSettings:
    """Settings of a trainer; imports torch."""
    from paceline.actors.engine.model_loader import resolve_device  # imports torch
    from paceline.actors.training.gate import GateSettings
    from paceline.actors.training.settings import DistillerSettings, TrainerSettings
    from paceline.actors.training.topic_schedule import ScheduleSettings, min_hope_for

    micro_batch, accumulation = config.training.batches(resolve_device(config.target.device).type)
    paths = {expert: str(path) for expert, path in config.draft_paths.items()}
    if config.replay.scope == "key":
        del paths[GENERAL]  # it learns from all topics, and so from all keys
    return TrainerSettings(
        draft_paths=paths,
        distiller=DistillerSettings(
            learning_rate=config.training.learning_rate,
            rate_hold_steps=config.training.rate_hold_steps,
            accumulation=accumulation,
            weight_decay=config.training.weight_decay,
            average_decay=config.training.average_decay,
            device=config.target.device,
            objective=config.training.objective,
            adapter=config.training.adapter,
            lora_rank=config.training.lora_rank,
            lora_alpha=config.training.lora_alpha,
            zero_stage=config.training.zero_stage,
            target_path=str(config.target_path),
        ),
        gate=GateSettings(min_gain=config.training.min_gain),
        schedule=ScheduleSettings(least_hope=min_hope_for(config.training.min_gain)),
        ranks=config.training.ranks,
        num_threads=config.training.num_threads,
        micro_batch=micro_batch,
        round_seconds=config.training.round_seconds,
        draft_top_k=config.drafts.top_k,
        report_losses="priority" in (config.replay.remover, config.replay.sampler),
        optimizer_dir=str(config.state_path / "optimizer"),
    )


def occupied_above(config: PacelineConfig, cores: int) -> int:
    """Requests that a replica may decode while a trainer runs; by default 0 without spare cores.

    Args:
        config: see PacelineConfig.
        cores: of the machine that target and trainers share; ignored for a trainer on a host of
            its own.
    """
    share = config.training.max_occupancy
    if share == "auto":
        share = _LIGHT_LOAD if _has_spare_cores(config, cores) else 0.0
    return int(share * config.target.max_num_seqs)


def _has_spare_cores(config: PacelineConfig, cores: int) -> bool:
    """Whether training takes no core from the target, the ingress, the router and Ray."""
    if config.placement.trainer_is_apart:
        return True
    threads = config.target.num_threads or default_threads(cores)
    serving = threads * config.target.most_replicas
    serving += config.drafts.pool_processes * config.drafts.num_threads
    shares_gpu = config.target.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    training = config.training.num_threads * config.training.ranks * config.training.trainers
    return not shares_gpu and serving + training + _OTHER_CORES <= cores


def evaluates_experts(config: PacelineConfig) -> bool:
    """Whether experts are evaluated: there is a choice, and a trainer's process for it."""
    chooses = config.router.enabled and bool(config.drafts.topics)
    return chooses and config.training.enabled and config.router.sample_share > 0.0


def scorer_settings(config: PacelineConfig) -> ScorerSettings:
    """Settings of the scorer; reads the models' files for their fingerprints."""
    from paceline.actors.engine.model_loader import resolve_device  # imports torch
    from paceline.actors.training.expert_evaluation import records_per_forward

    device = resolve_device(config.target.device).type
    micro_batch, _ = config.training.batches(device)
    return ScorerSettings(
        draft_paths={expert: str(path) for expert, path in config.draft_paths.items()},
        fingerprints=fingerprints(config.target_path, config.draft_paths),
        device=config.target.device,
        draft_top_k=config.drafts.top_k,
        micro_batch=records_per_forward(micro_batch, device),
        retention_s=config.replay.retention_hours * _HOUR_S,
        state_file=str(config.state_path / _ROUTING_STATE),
        target_path=str(config.target_path),
    )


def synthetic_settings(config: PacelineConfig) -> SyntheticSettings | None:
    """Settings of synthetic records; None if there are to be none."""
    if not config.training.enabled or not config.training.synthetic_per_record:
        return None
    return SyntheticSettings(
        per_record=config.training.synthetic_per_record,
        at_once=min(_SYNTHETIC_AT_ONCE, config.target.max_num_seqs),
    )
