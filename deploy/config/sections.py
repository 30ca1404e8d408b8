"""The sections of the configuration: a frozen model each, whose misspelt keys are errors."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.actors.engine.settings import DraftPlacement
from paceline.actors.replay.table import Remover, Sampler
from paceline.actors.router.policy import GENERAL
from paceline.actors.speculation.pool.draft_ahead import DraftAheadMode
from paceline.actors.training.settings import (
    Loss,
    ObjectiveSettings,
    Sampling,
    Weighting,
)
from paceline.actors.weights.topics import TOPIC_NAME
from paceline.cluster.autoscaling import AutoscalingConfig, most_replicas
from paceline.cluster.section import Count, Fraction, PerSecond, Seconds, Section

EMBEDDED = "embedded"
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def topic_name(name: str) -> str:
    """The name, if a topic may have it.

    Raises:
        ValueError: it may not.
    """
    if name in (GENERAL, "off", "auto") or not TOPIC_NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of a topic")
    return name


_MAX_TOKENS = 32  # drafted in a round
_STEP_RECORDS, _GPU_RECORDS = 8, 4  # of an optimizer's step, and of a micro-step on GPUs


class TargetConfig(Section):
    """The model that answers; ``path`` is a folder or ``embedded``.

    ``num_threads`` None takes half of the cores: a forward whose threads wait for a core that
    another process holds is many times slower than one on fewer threads. ``kv_cache_mb`` bounds
    the MiB of the target's keys and values, per replica; a request waits until there is room.
    ``numerics`` invariant has a token's logits be the same bits in every batch, or the start fail.

    A replica without a sign of life for ``stall_timeout_s`` counts as hung, and another goes on
    with its requests; one that finds none for ``give_up_after_s`` fails. One that Serve ends has
    ``drain_s`` for what it has begun; what is left then goes on elsewhere too.

    The streams of a replica get about ``stream_chunks_per_s`` together, but some twenty each: what
    comes between is sent with the next. 0 sends every round's tokens by themselves.

    ``autoscaling`` takes the place of ``num_replicas``: ``min_replicas``, ``max_replicas``,
    ``occupancy``, ``upscale_delay_s``, ``downscale_delay_s``, ``look_back_s``.
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
    autoscaling: AutoscalingConfig | None = None
    prefill_chunk: Count = 256
    prefix_cache: bool = True
    numerics: Literal["auto", "invariant"] = "auto"
    cuda_graphs: bool = True
    stall_timeout_s: Seconds = 20.0
    give_up_after_s: Seconds = 120.0
    drain_s: Seconds | None = None
    stream_chunks_per_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 250.0

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

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be."""
        return most_replicas(self.num_replicas, self.autoscaling)


class DraftsConfig(Section):
    """The models that propose: ``general`` and, per topic, an expert that starts as its copy.

    ``paths`` gives a topic's expert another starting point than ``general``.
    ``num_speculative_tokens`` "auto" drafts as many, up to ``max_speculative_tokens``, as give
    the most tokens per second by what is measured, and none where that does not pay.

    ``placement`` pool makes every expert a deployment of its own; the keys after it are for that
    alone. ``autoscaling`` takes the place of ``num_replicas``, see ``target``; an expert has no
    more replicas than there are targets.
    """

    general: str = EMBEDDED
    topics: tuple[str, ...] = ("math", "code", "sql", "shell")
    paths: dict[str, str] = Field(default_factory=dict)
    num_speculative_tokens: Literal["auto"] | int = "auto"
    max_speculative_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] = 8
    top_k: Count = 64
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
            topic_name(topic)
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
        """Replicas of all experts together, at most; 0 where drafts are colocated."""
        if self.placement != "pool":
            return 0
        return len(self.experts) * most_replicas(self.num_replicas, self.autoscaling)

    @property
    def experts(self) -> tuple[str, ...]:
        """Every expert: ``general`` first, then the topics."""
        return (GENERAL, *self.topics)


class RouterConfig(Section):
    """The classifier that finds a request's topic; late or unsure means ``general``.

    Every expert is scored on ``sample_share`` of the stored requests, as far as their prompts are
    held out, while serving is idle and training is on; then the best one drafts.

    ``placement`` ingress runs it in every replica of the front door, which spares each request the
    way to another process; deployment gives it one of its own, for a large classifier.

    ``min_confidence`` is what the likeliest topic needs, else ``general`` drafts. auto is what the
    classifier's config.json has under ``min_confidence``, for the topics that it was made for; for
    others, and where it has none, 0.5. A number holds for all topics, added ones too.
    """

    enabled: bool = True
    path: str = EMBEDDED
    placement: Literal["ingress", "deployment"] = "ingress"
    num_threads: Count = 1
    timeout_s: Seconds = 1.0
    min_confidence: Literal["auto"] | Fraction = "auto"
    sample_share: Fraction = 0.05


class ReplayConfig(Section):
    """What is kept of the served requests, per topic; on disk only with ``persist``.

    ``remover`` drops records when ``capacity_mb`` is full, ``sampler`` draws those that a round
    learns from; ``priority`` goes by the loss that the trainer last saw on a record.

    Of a flood each replica keeps ``max_records_per_s``, and what 16 seconds bring at once: to log
    all costs the answers time, and a trainer does not learn from more. null keeps all.
    """

    capacity_mb: Count = 64
    retention_hours: Seconds = 24.0
    max_records_per_s: PerSecond | None = 2.0
    remover: Remover = "fifo"
    sampler: Sampler = "recency"
    held_out_fraction: Fraction = 0.2
    top_k: Count = 32
    persist: bool = False


class TrainingConfig(Section):
    """How the drafts learn while serving is idle.

    ``loss``, ``weighting`` and ``sampling`` are what training minimises, at which positions, in
    whose contexts; ``jsd_beta`` is for the loss jsd, ``student_share`` for mixed sampling alone.

    ``canary_share`` of a topic's requests draft with a new version until they show that it is no
    worse than the present one, or are as many as the last look wants; 0 gives new versions to all
    requests at once. Above 0 every draft's weights take their memory twice.

    ``accumulation`` micro-steps of ``micro_batch`` records make a step of the optimizer; between
    two of them serving may have the processor back. ``micro_batch`` auto is 4 on GPUs and 1 on
    CPUs, where a record takes long enough, but one for each rank at least; ``accumulation`` auto
    makes a step of 8 records or some more. ``weight_decay`` is AdamW's.

    Above 0, ``rate_hold_steps`` has the learning rate fall as one over the optimizer's steps once
    there were so many, to a tenth at least, and be full again when the topic drifts.

    ``average_decay`` is that of the running mean of the weights in training, which is what is
    judged and served; 0 takes the weights as the last step left them.

    ``min_gain`` is what the gain of acceptance, on records held out, must exceed by its lower bound
    for new weights to be published.

    ``adapter`` lora trains low-rank adapters instead of every weight; what is served are the
    merged weights. ``zero_stage`` auto is 1 for bfloat16 and 0 for float32. ``ranks`` processes
    of ``num_threads`` each (on GPUs, one device each) share every micro-batch.

    Above 0, ``imagined_per_record`` has the idle target make up and answer so many prompts for each
    record that a topic has to learn from: more to learn from than the traffic brings, for the
    target's time.

    ``max_occupancy`` is the share of ``target.max_num_seqs`` that a replica may decode and still
    count as idle; auto is a quarter where serving, training and the rest have cores of their own,
    or training hosts of its own, and 0 elsewhere.

    ``trainers`` learn different topics at the same time, each in a process with its own ranks. A
    trainer that computes on, ``yield_timeout_s`` after a request has come, is started anew; None
    is 2 s on GPUs, and a minute on CPUs, where it runs at the lowest priority: one that serving
    leaves no time to come to its end does not hang, and takes nothing from anybody.
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
    canary_share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    imagined_per_record: Annotated[float, Field(ge=0.0, le=16.0)] = 0.0
    adapter: Literal["full", "lora"] = "full"
    lora_rank: Count = 16
    lora_alpha: Annotated[float, Field(gt=0.0)] = 32.0
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    ranks: Count = 1
    trainers: Count = 1
    yield_timeout_s: Seconds | None = None

    def batches(self, device: str) -> tuple[int, int]:
        """Records per micro-step and micro-steps per step of the optimizer, on such a device.

        Args:
            device: its type, like ``cpu``.
        """
        size, times = self.micro_batch, self.accumulation
        records = max(self.ranks, 1 if device == "cpu" else _GPU_RECORDS)
        micro_batch = records if size == "auto" else size
        return micro_batch, -(-_STEP_RECORDS // micro_batch) if times == "auto" else times

    @property
    def trial_share(self) -> float:
        """The canary's share; 0 where nothing is learnt."""
        return self.canary_share if self.enabled else 0.0

    @property
    def objective(self) -> ObjectiveSettings:
        """What training minimises."""
        return ObjectiveSettings(
            loss=self.loss,
            jsd_beta=self.jsd_beta,
            weighting=self.weighting,
            sampling=self.sampling,
            student_share=self.student_share,
        )


class TopicsConfig(Section):
    """Topics that are added while the server runs (``paceline topics add``).

    ``mutable`` false refuses that; what was added before is served all the same.
    """

    mutable: bool = True


class OperationsConfig(Section):
    """What operators may do over HTTP: roll back, purge replay, drain.

    They call from the server's own machine, or show an API key where there are some. ``enabled``
    false refuses it all; ``topics.mutable`` is for topics alone.
    """

    enabled: bool = True


class IngressConfig(Section):
    """The front door; the death of a replica breaks the connections that it holds.

    One that Serve ends, for another configuration or a host that is to go, has ``drain_s`` for
    what it has begun.
    """

    num_replicas: Count = 1
    drain_s: Seconds | None = None


class AuthConfig(Section):
    """Who may use the server: ``api_keys_env`` names the environment variable with its API keys.

    They are separated by commas and read at the start. Where there are none, or the name is null,
    everybody may.
    """

    api_keys_env: Annotated[str, Field(min_length=1)] | None = "PACELINE_API_KEYS"


class UiConfig(Section):
    """The page at ``/ui``, for people with a browser."""

    enabled: bool = True


class RayConfig(Section):
    """The local Ray session that ``paceline serve`` starts and ends."""

    num_cpus: Count | None = None
    dashboard: bool = True
    dashboard_port: Annotated[int, Field(ge=1, le=65535)] = 8265
    object_store_mb: Annotated[int, Field(ge=80)] | None = None
    logs: bool = False
