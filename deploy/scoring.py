"""The part of the config that the scorer works by."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from paceline.actors.training.settings import ScorerSettings
from paceline.actors.weights.state_folder import fingerprints
from paceline.deploy.config.config import PacelineConfig

if TYPE_CHECKING:
    from paceline.actors.training.expert_evaluation import ExpertEvaluator

logger = logging.getLogger(__name__)

STATE_FILE = "routing.json"  # below the state folder
_HOUR_S = 3600.0


def scores_experts(config: PacelineConfig) -> bool:
    """Whether experts are compared: where there is something to choose, and a trainer's process."""
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
        state_file=str(config.state_path / STATE_FILE),
    )


def make_evaluator(config: PacelineConfig) -> tuple[ScorerSettings, ExpertEvaluator] | None:
    """The scorer's settings and what runs its experts, loaded; imports torch.

    None where nothing is to be scored, or the drafts cannot be: learning goes on all the same.
    """
    if not scores_experts(config):
        return None
    from paceline.actors.training.expert_evaluation import ExpertEvaluator

    try:
        settings = scorer_settings(config)
        return settings, ExpertEvaluator(settings)
    except Exception:
        logger.warning("experts cannot be scored, topics go to their own", exc_info=True)
        return None
