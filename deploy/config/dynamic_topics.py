"""The configuration with topics that were added while the server ran."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.actors.weights.topics import read_catalogue
from paceline.deploy.config.config import WEIGHTS_FOLDER, PacelineConfig


def with_added(config: PacelineConfig) -> PacelineConfig:
    """The configuration with the topics that the state folder lists as added.

    Their experts start from ``general``'s folder, as they did when they were added.
    """
    added = read_catalogue(config.state_path / WEIGHTS_FOLDER).topics
    return with_topics(config, [topic.name for topic in added])


def with_topics(config: PacelineConfig, names: Sequence[str]) -> PacelineConfig:
    """The configuration with further topics; known names change nothing."""
    new = tuple(name for name in names if name not in config.drafts.experts)
    if not new:
        return config
    drafts = config.drafts.model_copy(update={"topics": (*config.drafts.topics, *new)})
    return config.model_copy(update={"drafts": drafts})
