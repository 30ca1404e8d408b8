"""The models of a configuration: fetched, shipped with Paceline, or made from the target."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.actors.engine.compatibility import read_config
from paceline.actors.weights.checkpoint import ModelError, read_architecture
from paceline.deploy import model_store
from paceline.deploy.config.config import PacelineConfig
from paceline.deploy.config.sections import AUTO
from paceline.deploy.errors import ConfigError


def fetch_models(config: PacelineConfig, say: Callable[[str], None]) -> PacelineConfig:
    """Fetch target and router, and make the target's draft if that is ``auto`` and there is none.

    Args:
        config: see PacelineConfig.
        say: receives a line per step.

    Returns:
        the configuration; with ``drafts.general: none`` if no draft can be made for the target.

    Raises:
        ConfigError: one line.
    """
    target = model_store.fetch(config.target.path, say, "target.path")
    try:
        read_config(target, "target")
        if config.drafts.general == AUTO:
            config = with_draft(config, target, say)
        encoder = config.encoder
    except ModelError as error:
        raise ConfigError(str(error)) from error
    if encoder is not None:
        model_store.fetch(encoder, say, "router.path")
    return config


def with_draft(config: PacelineConfig, target: Path, say: Callable[[str], None]) -> PacelineConfig:
    """Make the draft of ``drafts.general: auto`` if there is none.

    Args:
        config: with that key.
        target: its folder.
        say: receives a line per step.

    Returns:
        see fetch_models.

    Raises:
        ConfigError: one line.
    """
    from paceline.actors.weights.eagle import is_llama_like, is_made_for

    try:
        architecture = read_architecture(target, "target")
        if not is_llama_like(architecture):
            kind = architecture.model_type
            say(f"No draft can be made for models of type {kind}: serving without drafts")
            return config.without_drafts()
        folder = config.auto_draft
        if not is_made_for(folder, target):
            if folder == config.learnt_draft:
                raise ConfigError(
                    f"drafts.general: {folder} was made for other weights than those in {target}; "
                    "make another one (paceline draft make), or move it away"
                )
            say(f"Making a draft from the target's first layer, untrained, in {folder}")
            make_untrained(target, folder)
    except ConfigError:
        raise
    except ModelError as error:
        raise ConfigError(str(error)) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"drafts.general: {error}") from error
    return config


def make_untrained(target: Path, folder: Path) -> None:
    """Write the draft that a target gives without any training, whole or not at all."""
    from paceline.actors.weights.eagle import new_draft, save_draft

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as temporary:
        save_draft(new_draft(target), temporary)
        # In this order: a draft is there if its config is. Another process writes the same.
        for name in ("model.safetensors", "config.json"):
            (Path(temporary) / name).replace(folder / name)
