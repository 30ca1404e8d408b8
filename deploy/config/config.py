"""The configuration: read YAML into a frozen model; errors are one line and name the key."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from paceline.actors.router.key_scope import key_topic, topic_of
from paceline.actors.weights.topics import read_catalogue
from paceline.cluster.placement import PlacementConfig, WeightsConfig
from paceline.cluster.section import Section
from paceline.deploy import model_store
from paceline.deploy.config.sections import (
    AUTO,
    MINILM,
    NO_DRAFTS,
    AuthConfig,
    DraftsConfig,
    IngressConfig,
    OperationsConfig,
    RayConfig,
    ReplayConfig,
    RouterConfig,
    TargetConfig,
    TopicsConfig,
    TrainingConfig,
    UiConfig,
)
from paceline.deploy.errors import ConfigError

WEIGHTS_FOLDER = "weights"  # of versions and decisions, in the state folder
MAX_TOPICS = 32  # beside ``general``
_BY_KEY = "by-key"  # state of replay.scope: key, in the state folder
MODELS_DIR = Path(__file__).parents[1] / "models"


class PacelineConfig(Section):
    """The configuration of ``paceline serve``."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"  # "" would be all addresses
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    model_name: Annotated[str, Field(min_length=1)] = "paceline"
    state_dir: str | None = None
    target: TargetConfig = Field(default_factory=TargetConfig)
    drafts: DraftsConfig = Field(default_factory=DraftsConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    topics: TopicsConfig = Field(default_factory=TopicsConfig)
    operations: OperationsConfig = Field(default_factory=OperationsConfig)
    ingress: IngressConfig = Field(default_factory=IngressConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)
    ui: UiConfig = Field(default_factory=UiConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, data: Any) -> Any:
        """Read a section whose keys are all commented out, null in YAML, as an empty one."""
        if not isinstance(data, dict):
            return data
        kinds = {key: field.annotation for key, field in cls.model_fields.items()}
        sections = {
            k for k, own in kinds.items() if isinstance(own, type) and issubclass(own, Section)
        }
        return {k: {} if value is None and k in sections else value for k, value in data.items()}

    @model_validator(mode="before")
    @classmethod
    def _without_drafts(cls, data: Any) -> Any:
        """Turn off by default what needs drafts if there are none."""
        drafts = data.get("drafts") if isinstance(data, dict) else None
        if not isinstance(drafts, dict) or drafts.get("general") != NO_DRAFTS:
            return data
        off = {"router": {"enabled": False}, "training": {"enabled": False}}
        given = {key: data.get(key) or {} for key in off}
        if not all(isinstance(section, dict) for section in given.values()):
            return data
        sections = {key: off[key] | given[key] for key in off}
        return data | sections | {"drafts": {"topics": ()} | drafts}

    @model_validator(mode="after")
    def _nothing_to_train(self) -> Self:
        if self.drafts.general == NO_DRAFTS and (self.router.enabled or self.training.enabled):
            raise ValueError("drafts.general none leaves nothing to route to and to train")
        if self.training.enabled and not self.replay.enabled:
            raise ValueError(
                "replay.enabled false leaves nothing to train on: set training.enabled false, too"
            )
        return self

    @model_validator(mode="after")
    def _experts_by_key(self) -> Self:
        if self.replay.scope != "key":
            return self
        if not self.auth.keys:
            raise ValueError("replay.scope key needs names in auth.keys: each learns on its own")
        if self.drafts.placement == "pool":
            raise ValueError("replay.scope key needs drafts.placement colocated")
        if (count := len(self.experts) - 1) > MAX_TOPICS:
            raise ValueError(
                f"replay.scope key makes {count} experts, one per key and topic, and at most "
                f"{MAX_TOPICS} can be: leave out some of auth.keys or of drafts.topics"
            )
        return self

    @property
    def experts(self) -> tuple[str, ...]:
        """All experts, ``general`` first; with a scope by key those of each key."""
        if self.replay.scope != "key":
            return self.drafts.experts
        own = (key_topic(key, topic) for key in self.auth.keys for topic in self.drafts.experts)
        return (*self.drafts.experts[:1], *own)

    @property
    def target_path(self) -> Path:
        """Folder of the target; ``model_store.fetch`` makes it if it is fetched or converted."""
        return model_store.locate(self.target.path)

    @property
    def router_path(self) -> Path:
        """Folder of the topic classifier, or of its head."""
        if self.router.path == MINILM:
            return MODELS_DIR / "router-minilm"
        return model_store.expanded(self.router.path)

    @property
    def encoder(self) -> str | None:
        """The model that the topic head reads; None for a classifier that is a model of its own.

        Raises:
            ModelError: the router's config cannot be read.
        """
        from paceline.actors.engine.compatibility import read_config  # torch: seconds

        if not self.router.enabled:
            return None
        name = read_config(self.router_path, "router").get("encoder")
        return None if name is None else str(name)

    @property
    def encoder_path(self) -> Path | None:
        """Folder of :attr:`encoder`; ``model_store.fetch`` makes it if it is fetched."""
        return None if self.encoder is None else model_store.locate(self.encoder)

    @property
    def draft_paths(self) -> dict[str, Path]:
        """Folder of the initial weights by expert."""
        general = self.drafts.general
        folder = self.auto_draft if general == AUTO else model_store.expanded(general)
        own = {topic: model_store.expanded(path) for topic, path in self.drafts.paths.items()}
        return {expert: own.get(topic_of(expert), folder) for expert in self.experts}

    @property
    def auto_draft(self) -> Path:
        """Folder of ``drafts.general: auto``: of the learnt draft, else of an untrained one."""
        untrained = self.made_draft.with_name(f"{self.made_draft.name}-untrained")
        return self.learnt_draft or untrained

    @property
    def learnt_draft(self) -> Path | None:
        """Folder of the target's draft that was made here, else shipped; None if there is none."""
        if (self.made_draft / "config.json").is_file():
            return self.made_draft
        for name in model_store.PACKAGED:
            shipped = MODELS_DIR / f"draft-{name}"
            if shipped.is_dir() and model_store.packaged_folder(name) == self.target_path:
                return shipped
        return None

    @property
    def made_draft(self) -> Path:
        """Folder of the draft that ``paceline draft make`` makes from the target."""
        digest = hashlib.blake2b(str(self.target_path).encode(), digest_size=6).hexdigest()
        cache = model_store.cache_folder().parent / "drafts"
        return cache / f"{self.target_path.name}-{digest}"

    def without_drafts(self) -> Self:
        """The configuration that serves the target alone."""
        changes = {
            "drafts": {"general": NO_DRAFTS, "topics": (), "paths": {}},
            "router": {"enabled": False},
            "training": {"enabled": False},
        }
        sections = {k: getattr(self, k).model_copy(update=v) for k, v in changes.items()}
        return self.model_copy(update=sections)

    @property
    def state_path(self) -> Path:
        """Folder of weight versions and gate decisions; by key apart from those of all."""
        chosen = self.weights.storage or self.state_dir
        if chosen is not None:
            folder = model_store.expanded(str(chosen))
        else:
            home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
            folder = model_store.expanded(home) / "paceline"
        return folder / _BY_KEY if self.replay.scope == "key" else folder

    @property
    def other_state_path(self) -> Path:
        """Folder of the state of the other ``replay.scope``."""
        own = self.state_path
        return own.parent if self.replay.scope == "key" else own / _BY_KEY

    def with_topics(self, names: Iterable[str]) -> Self:
        """The configuration with further topics, whose experts start from ``general``'s folder."""
        new = tuple(name for name in names if name not in self.drafts.experts)
        if not new:
            return self
        drafts = self.drafts.model_copy(update={"topics": (*self.drafts.topics, *new)})
        return self.model_copy(update={"drafts": drafts})

    def with_added_topics(self) -> Self:
        """The configuration with the topics that were added while a server ran."""
        added = read_catalogue(self.state_path / WEIGHTS_FOLDER).topics
        return self.with_topics(topic.name for topic in added)


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> PacelineConfig:
    """Read a YAML file and apply overrides.

    Args:
        path: YAML file; None for the defaults.
        overrides: dotted key to value (``{"target.dtype": "float32"}``).

    Raises:
        ConfigError: names the file or the key.
    """
    data = {} if path is None else _read_yaml(Path(path))
    for key, value in (overrides or {}).items():
        _set(data, key.split("."), value)
    try:
        return PacelineConfig.model_validate(data)
    except ValidationError as error:
        source = "config" if path is None else f"config {path}"
        raise ConfigError(f"{source}: {explain(error, PacelineConfig)}") from error


class _Loader(yaml.SafeLoader):
    """YAML in which no key is given twice: the first one would be silently dropped."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            line = node.start_mark.line + 1
            raise ValueError(f"{twice[0]} is given twice in the mapping of line {line}")
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text"
        raise ConfigError(f"config {path}: {reason}") from error
    try:
        data = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2024-13-01
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
            inner = {} if inner is None else {"": inner}  # a scalar stays an error, which names it
            data[key] = inner
        data = inner
    data[keys[-1]] = value


def explain(error: ValidationError, model: type[Section]) -> str:
    """The first problem of a pydantic error in one line that names the key.

    Args:
        error: of a validation.
        model: validated; its keys are suggested for a misspelt one.
    """
    errors = error.errors()
    loc = _key(errors[0]["loc"])
    branches = [each for each in errors if _key(each["loc"]) == loc]
    if errors[0]["type"] == "extra_forbidden":
        reason = "no such key" + _suggestion(loc, model)
    else:
        reasons = [each["msg"].removeprefix("Value error, ") for each in branches]
        reason = ", or ".join(each[:1].lower() + each[1:] for each in reasons)
    more = len({_key(each["loc"]) for each in errors}) - 1
    name = ".".join(str(part) for part in loc)
    named = f"{name}: {reason}" if name else reason
    return named + (f" (and {more} more)" if more else "")


def _key(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A key's location without the branch of a union."""
    is_branch = bool(loc) and str(loc[-1]).startswith(("literal[", "constrained-"))
    return loc[:-1] if is_branch else loc


def _suggestion(loc: tuple[int | str, ...], model: Any) -> str:
    """A hint at the known key most similar to an unknown one."""
    from difflib import get_close_matches

    for part in loc[:-1]:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            return ""
        model = field.annotation
    names = list(getattr(model, "model_fields", {}))
    close = get_close_matches(str(loc[-1]), names, n=1)
    return f"; did you mean {close[0]}?" if close else ""
