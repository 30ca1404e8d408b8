"""The models of a configuration: fetched, shipped with Paceline, or made from the target."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.actors.engine.compatibility import read_config
from paceline.actors.weights.checkpoint import ModelError, read_architecture
from paceline.actors.weights.state_folder import fingerprint
from paceline.deploy import model_store
from paceline.deploy.config.config import PacelineConfig
from paceline.deploy.config.sections import AUTO
from paceline.deploy.errors import ConfigError

_FILES = ("model.safetensors", "config.json")  # in this order: a draft is there if its config is


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


def share_draft(config: PacelineConfig) -> PacelineConfig:
    """Copy the draft of ``drafts.general: auto`` to ``weights.storage``, and name it there.

    Hosts would each take the draft that was made on them, if any. A changed draft gets another
    folder: replicas of an earlier deployment may still read theirs.

    Raises:
        ConfigError: the storage cannot be written.
    """
    if config.drafts.general != AUTO:
        return config
    made = config.auto_draft
    shared = Path(str(config.weights.storage)) / "drafts" / fingerprint([made])
    try:
        if not (shared / "config.json").is_file():
            _write(shared, lambda folder: [shutil.copy(made / name, folder) for name in _FILES])
    except OSError as error:
        raise ConfigError(f"weights.storage: {error}") from error
    drafts = config.drafts.model_copy(update={"general": str(shared)})
    return config.model_copy(update={"drafts": drafts})


def make_untrained(target: Path, folder: Path) -> None:
    """Write the draft that a target gives without any training, whole or not at all."""
    from paceline.actors.weights.eagle import new_draft, save_draft

    _write(folder, lambda temporary: save_draft(new_draft(target), temporary))


def _write(folder: Path, fill: Callable[[str], object]) -> None:
    """Write a draft, whole or not at all; ``fill`` writes its files to a temporary folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as temporary:
        fill(temporary)
        for name in _FILES:  # another process writes the same
            (Path(temporary) / name).replace(folder / name)
