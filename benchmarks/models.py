"""Models of a study: the small ones of tests/fixtures, or any target with its `auto` draft."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import say

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.colocated import ProfiledStack
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.draft_store import fetch_models

SMALL = "small"
_FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures"
TARGET, DRAFT, ROUTER = (_FIXTURES / name for name in ("target", "draft-general", "router"))
# Keys of the configuration.
SMALL_MODELS = {
    "target.path": str(TARGET),
    "drafts.general": str(DRAFT),
    "router.path": str(ROUTER),
}
_DECIDING = ("config.json", "tokenizer.json")


def config_of(target: str, overrides: Mapping[str, Any] | None = None) -> PacelineConfig:
    """Configuration with a target and its drafts, which are fetched or made if they are missing.

    Args:
        target: as ``target.path``, with the default drafts and router, or ``SMALL``.
        overrides: of other keys.

    Raises:
        ConfigError: one line.
    """
    chosen = SMALL_MODELS if target == SMALL else {"target.path": target}
    return fetch_models(load_config(None, chosen | (overrides or {})), say)


def find_models(target: str, draft: str | None = None) -> tuple[Path, Path]:
    """Folders of a target and of its draft, ``draft`` (as ``drafts.general``) or its own.

    Raises:
        ConfigError: one line.
    """
    own = {} if draft is None else {"drafts.general": draft}
    config = config_of(target, {"router.enabled": False, **own})
    return config.target_path, config.draft_paths["general"]


def load_engine(
    drafts: Mapping[str, str],
    *,
    threads: int,
    k: int | None = None,
    target: Path = TARGET,
    beside: Callable[[ModelRunner], Sequence[ProfiledStack]] | None = None,
    **settings: Any,
) -> tuple[Engine, Any, dict[str, Any]]:
    """Engine of a target, its tokenizer and facts; ``beside`` as build_engine takes it.

    ``settings`` as TargetSettings.

    Without a prefix cache, since prompts come back for every variant.
    """
    common: dict[str, Any] = {"num_threads": threads, "num_speculative_tokens": k}
    common |= {"prefix_cache": False, "seed": 1}
    own = TargetSettings(str(target), dict(drafts), **(common | settings))
    return build_engine(own, beside=beside)


def model_hashes(*folders: Path) -> dict[str, str]:
    """sha256 of the files that decide what a model says, by folder and file."""
    files = [
        path
        for folder in folders
        for path in [*(folder / n for n in _DECIDING), *sorted(folder.glob("*.safetensors"))]
        if path.is_file()
    ]
    return {f"{path.parent.name}/{path.name}": file_hash(path) for path in files}


def file_hash(path: Path) -> str:
    """sha256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
