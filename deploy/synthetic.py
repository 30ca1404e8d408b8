"""Settings of synthetic prompts, from the config."""

from __future__ import annotations

import logging
from typing import Any

from paceline.actors.training.synthetic.prompts import SyntheticSettings, TurnMarks, turn_marks
from paceline.deploy.config.config import PacelineConfig
from paceline.deploy.errors import ConfigError

logger = logging.getLogger(__name__)

_AT_ONCE = 4


def synthetic_settings(config: PacelineConfig) -> SyntheticSettings | None:
    """Settings of synthetic prompts; None if there are to be none.

    Raises:
        ConfigError: the target's chat template does not allow it.
    """
    if not config.training.enabled or not config.training.synthetic_per_record:
        return None
    return SyntheticSettings(
        marks=_marks(config),
        per_record=config.training.synthetic_per_record,
        held_out_fraction=config.replay.held_out_fraction,
        at_once=min(_AT_ONCE, config.target.max_num_seqs),
    )


def synthetic_settings_of(config: PacelineConfig, first: bool) -> SyntheticSettings | None:
    """The same in a trainer's process; None if it is not the first, or cannot.

    Args:
        config: see PacelineConfig.
        first: of the trainers: the others leave it to that one.
    """
    try:
        return synthetic_settings(config) if first else None
    except ConfigError:
        logger.warning("no synthetic prompts are made, learning goes on", exc_info=True)
        return None


def target_handle() -> Any:
    """Handle of the target's deployment; raises before it is deployed."""
    from ray import serve  # late: what is refused before a start is told without Ray

    from paceline.deploy.app import APPLICATION  # it imports what imports this

    return serve.get_deployment_handle("target", APPLICATION)


def _marks(config: PacelineConfig) -> TurnMarks:
    from paceline.actors.engine.model_loader import load_tokenizer  # imports transformers

    try:
        return turn_marks(load_tokenizer(str(config.target_path)))
    except Exception as error:  # of files, or whatever a template raises
        raise ConfigError(f"training.synthetic_per_record: {error}") from error
