"""Typed configuration: YAML in, a frozen model out, errors of one line that name the key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.actors.decoding.pool.ahead import DraftAhead
from paceline.actors.decoding.settings import DraftPlacement
from paceline.actors.routing.policy import GENERAL
from paceline.deploy.errors import ConfigError

EMBEDDED = "embedded"
WEIGHTS_FOLDER = "weights"  # below the state folder: versions and decisions
MODELS_DIR = Path(__file__).parent / "models"
_TOPIC = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]
_MAX_TOKENS = 32  # drafted in a round
Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class TargetConfig(_Section):
    """The model that answers; ``path`` is a folder or ``embedded``.

    ``num_threads`` None takes half of the cores: a forward whose threads wait for a core that
    another process holds is many times slower than one on fewer threads. ``kv_cache_mb`` bounds
    the MiB of the target's keys and values, per replica; a request waits until there is room.
    ``numerics`` invariant has a token's logits be the same bits in every batch, or the start fail.

    A replica without a sign of life for ``stall_timeout_s`` counts as hung, and another goes on
    with its requests; one that finds none for ``give_up_after_s`` fails.
    """

    path: str = EMBEDDED
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    device: str = "auto"
    num_threads: Count | None = None
    max_num_seqs: Count = 16
    max_model_len: Count | None = None
    kv_cache_mb: Count | None = None
    max_queued_requests: Count = 256
    max_seqs_per_client: Count | None = None
    request_timeout_s: Seconds = 600.0
    num_replicas: Count = 1
    prefill_chunk: Count = 256
    prefix_cache: bool = True
    numerics: Literal["auto", "invariant"] = "auto"
    cuda_graphs: bool = False
    stall_timeout_s: Seconds = 20.0
    give_up_after_s: Seconds = 120.0

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"{device!r} is none of auto, cpu, cuda, cuda:0 ...")
        return device

    @model_validator(mode="after")
    def _looks_further(self) -> Self:
        if self.give_up_after_s <= self.stall_timeout_s:
            raise ValueError(
                f"give_up_after_s ({self.give_up_after_s:g}) must be more than stall_timeout_s "
                f"({self.stall_timeout_s:g}): no request would look for a second replica"
            )
        return self


class DraftsConfig(_Section):
    """The models that propose: ``general`` and, per topic, an expert that starts as its copy.

    ``paths`` gives a topic's expert another starting point than ``general``.
    ``num_speculative_tokens`` "auto" drafts as many, up to ``max_speculative_tokens``, as give
    the most tokens per second by what is measured, and none where that does not pay.

    ``placement`` pool makes every expert a deployment of its own; the keys after it are for that
    alone.
    """

    general: str = EMBEDDED
    topics: tuple[str, ...] = ("math", "code", "sql", "shell")
    paths: dict[str, str] = Field(default_factory=dict)
    num_speculative_tokens: Literal["auto"] | int = "auto"
    max_speculative_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] = 8
    top_k: Count = 64
    placement: DraftPlacement = "colocated"
    round_timeout_ms: Annotated[float, Field(gt=0.0, le=60_000.0)] = 100.0
    draft_ahead: DraftAhead = "auto"
    num_replicas: Count = 1
    num_threads: Count = 1
    num_gpus: Fraction = 0.0
    across_nodes: bool = False

    @field_validator("draft_ahead", mode="before")
    @classmethod
    def _yaml_switch(cls, switch: object) -> object:
        return {True: "on", False: "off"}[switch] if isinstance(switch, bool) else switch

    @field_validator("num_speculative_tokens", mode="before")
    @classmethod
    def _auto_or_number(cls, tokens: object) -> object:
        # Not a union of constraints: its errors would name parts that no config has.
        number = isinstance(tokens, int) and not isinstance(tokens, bool)
        if tokens != "auto" and not (number and 0 <= int(str(tokens)) <= _MAX_TOKENS):
            raise ValueError(f"{tokens!r} is neither auto nor a number from 0 to {_MAX_TOKENS}")
        return tokens

    @field_validator("topics")
    @classmethod
    def _names(cls, topics: tuple[str, ...]) -> tuple[str, ...]:
        for topic in topics:
            if topic in (GENERAL, "off", "auto") or not _TOPIC.fullmatch(topic):
                raise ValueError(f"{topic!r} cannot be the name of a topic")
        if len(set(topics)) != len(topics):
            raise ValueError("a topic is named twice")
        return topics

    @model_validator(mode="after")
    def _known(self) -> Self:
        unknown = sorted(set(self.paths) - set(self.topics))
        if unknown:
            raise ValueError(f"paths names {unknown[0]!r}, which is not among topics")
        return self

    @property
    def pool_processes(self) -> int:
        """Replicas of all experts together; 0 where drafts are colocated."""
        return len(self.experts) * self.num_replicas if self.placement == "pool" else 0

    @property
    def experts(self) -> tuple[str, ...]:
        """Every expert: ``general`` first, then the topics."""
        return (GENERAL, *self.topics)


class RouterConfig(_Section):
    """The classifier that finds a request's topic; late or unsure means ``general``."""

    enabled: bool = True
    path: str = EMBEDDED
    num_threads: Count = 1
    timeout_s: Seconds = 1.0
    min_confidence: Fraction = 0.5


class ReplayConfig(_Section):
    """What is kept of the served requests, per topic; on disk only with ``persist``."""

    capacity_mb: Count = 64
    retention_hours: Seconds = 24.0
    remover: Literal["fifo", "reservoir"] = "fifo"
    held_out_fraction: Fraction = 0.2
    top_k: Count = 32
    persist: bool = False


class TrainingConfig(_Section):
    """How the drafts learn while serving is idle."""

    enabled: bool = True
    learning_rate: Annotated[float, Field(gt=0.0)] = 1.5e-3
    num_threads: Count = 1
    micro_batch: Count = 8
    round_seconds: Seconds = 8.0
    idle_after_s: Seconds = 0.08
    max_occupancy: Fraction = 0.25
    keep_versions: Count = 3


class IngressConfig(_Section):
    """The front door; the death of a replica breaks the connections that it holds."""

    num_replicas: Count = 1


class RayConfig(_Section):
    """The local Ray session that ``paceline serve`` starts and ends."""

    num_cpus: Count | None = None
    dashboard: bool = True
    dashboard_port: Annotated[int, Field(ge=1, le=65535)] = 8265
    object_store_mb: Annotated[int, Field(ge=80)] | None = None
    logs: bool = False


class PacelineConfig(_Section):
    """Everything that ``paceline serve`` can be told."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    model_name: Annotated[str, Field(min_length=1)] = "paceline"
    state_dir: str | None = None
    target: TargetConfig = Field(default_factory=TargetConfig)
    drafts: DraftsConfig = Field(default_factory=DraftsConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    ingress: IngressConfig = Field(default_factory=IngressConfig)
    ray: RayConfig = Field(default_factory=RayConfig)

    @property
    def target_path(self) -> Path:
        """Folder of the target."""
        return _resolve(self.target.path, "target")

    @property
    def router_path(self) -> Path:
        """Folder of the topic classifier."""
        return _resolve(self.router.path, "router")

    @property
    def draft_paths(self) -> dict[str, Path]:
        """Expert to the folder of its initial weights."""
        return {
            expert: _resolve(self.drafts.paths.get(expert, self.drafts.general), "draft-general")
            for expert in self.drafts.experts
        }

    @property
    def state_path(self) -> Path:
        """Where weight versions and gate decisions outlive a restart."""
        if self.state_dir is not None:
            return Path(self.state_dir).expanduser().absolute()
        home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(home).expanduser() / "paceline"


def default_threads(cores: int) -> int:
    """Threads of the target on a machine of so many cores: half, the rest is for all else."""
    return max(1, cores // 2)


def _resolve(path: str, embedded: str) -> Path:
    return MODELS_DIR / embedded if path == EMBEDDED else Path(path).expanduser().absolute()


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> PacelineConfig:
    """Read a YAML file and lay overrides over it.

    Args:
        path: YAML file; None takes every default.
        overrides: dotted key to value (``{"target.dtype": "float32"}``); they win.

    Raises:
        ConfigError: one line that names the file or the key.
    """
    data = {} if path is None else _read_yaml(Path(path))
    for key, value in (overrides or {}).items():
        _set(data, key.split("."), value)
    try:
        return PacelineConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, path)) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text"
        raise ConfigError(f"config {path}: {reason}") from error
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2024-13-01 is no date
        reason = " ".join(str(error).split())
        raise ConfigError(f"config {path}: not YAML ({reason})") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config {path}: must be a mapping of keys to values")
    return data


def _set(data: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = data.get(key)
        if not isinstance(inner, dict):
            inner = {} if inner is None else {"": inner}  # a scalar stays wrong, and is named
            data[key] = inner
        data = inner
    data[keys[-1]] = value


def _explain(error: ValidationError, path: str | Path | None) -> str:
    """The first problem of a pydantic error in one line that names the key."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "(top level)"
    if first["type"] == "extra_forbidden":
        reason = "no such key" + _suggestion(first["loc"])
    else:
        reason = first["msg"].removeprefix("Value error, ")
        reason = reason[:1].lower() + reason[1:]
    source = "config" if path is None else f"config {path}"
    more = error.error_count() - 1
    return f"{source}: {key}: {reason}" + (f" (and {more} more)" if more else "")


def _suggestion(loc: tuple[int | str, ...]) -> str:
    """The known key that a misspelt one was probably meant to be."""
    from difflib import get_close_matches

    model: Any = PacelineConfig
    for part in loc[:-1]:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            return ""
        model = field.annotation
    names = list(getattr(model, "model_fields", {}))
    close = get_close_matches(str(loc[-1]), names, n=1)
    return f"; did you mean {close[0]}?" if close else ""
