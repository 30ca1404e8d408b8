"""Sampling parameters of requests that do not name them: those that the model recommends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from paceline.actors.weights.checkpoint import ModelError
from paceline.deploy.api.request_schemas import SamplingOptions

# As vLLM takes them (`--generation-config auto`), but its limit of tokens.
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

OptionsT = TypeVar("OptionsT", bound=SamplingOptions)


def default_sampling_params(model_path: str | Path) -> dict[str, float]:
    """Read the request fields that a model's ``generation_config.json`` sets.

    Raises:
        ModelError: a value is none that a request may have.
    """
    file = Path(model_path) / "generation_config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    given = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    try:
        SamplingOptions.model_validate({"model": "", **given})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(map(str, problem["loc"]))
        raise ModelError(f"target: {file}: {name}: {problem['msg']}") from error
    return given


def with_defaults(options: OptionsT, defaults: Mapping[str, float]) -> OptionsT:
    """The options with defaults for the fields that the request leaves out or sends as null."""
    missing = {name: value for name, value in defaults.items() if getattr(options, name) is None}
    return options.model_copy(update=missing) if missing else options
