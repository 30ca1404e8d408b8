"""Settings of a target replica and of its engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.actors.cores import available_cores, default_threads

DraftPlacement = Literal["colocated", "pool"]
Numerics = Literal["auto", "invariant"]
SuffixSource = Literal["off", "request", "topic"]
MAX_SPECULATIVE_TOKENS = 32  # per round


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Settings of one target replica.

    Attributes:
        model_path: folder of the target.
        drafts: model folder per expert (all topics and ``general``); ``<expert>@0``, its frozen
            initial weights, needs no entry.
        dtype: auto, bfloat16, float16 or float32.
        device: auto, cpu or cuda: Ray shows a process the GPUs that it books, and it uses the
            first.
        gpu_share: of the memory of a GPU, for this process.
        num_threads: torch threads of the engine; None is the default for the cores there.
        max_num_seqs: maximum running requests.
        max_model_len: None takes the target's own limit.
        kv_cache_mb: MiB of the target's KV cache; None is enough for ``max_num_seqs`` full
            contexts, on GPUs at most a part of the free memory. Drafts have as many positions on
            top, each expert of a pool as many as all targets together.
        num_speculative_tokens: per round; None follows the measured goodput.
        max_speculative_tokens: limit of what goodput chooses.
        draft_top_k: tokens that a draft samples from.
        replay_top_k: target probabilities recorded per position.
        replay_branches: also record those behind rejected tokens.
        prefill_chunk: prompt tokens per round.
        prefix_cache: reuse the KV of earlier requests with the same prefix.
        numerics: invariant gives a token's logits the same bits in every batch, or fails the
            start; auto takes what is fastest.
        cuda_graphs: replay short forwards on GPUs.
        seed: of unseeded requests; None is random.
        placement: pool has every expert in its own process.
        round_timeout_ms: a round's wait for the pool.
        stall_timeout_s: a replica without a heartbeat for so long counts as hung.
        stream_chunks_per_s: of each stream; 0 sends one chunk per stream and round.
        sample_share: of the recorded requests, offered to the scorer of experts with all prompts
            of the ``held_out_fraction``.
        held_out_fraction: of the prompts.
        canary_share: of the requests, drafted by an expert's candidate if there is one; above 0
            every expert has a second weight slot.
        suffix: where suffix drafts come from: nowhere, the request's own tokens, or recorded
            answers of its topic too.
        retention_s: age at which a recorded answer is removed from them.
    """

    model_path: str
    drafts: dict[str, str] = field(default_factory=dict)
    dtype: str = "auto"
    device: str = "auto"
    gpu_share: float = 1.0
    num_threads: int | None = 2
    max_num_seqs: int = 16
    max_model_len: int | None = None
    kv_cache_mb: int | None = None
    num_speculative_tokens: int | None = None
    max_speculative_tokens: int = 8
    draft_top_k: int = 64
    replay_top_k: int = 32
    replay_branches: bool = False
    prefill_chunk: int = 256
    prefix_cache: bool = True
    numerics: Numerics = "auto"
    cuda_graphs: bool = True
    seed: int | None = None
    placement: DraftPlacement = "colocated"
    round_timeout_ms: float = 100.0
    stall_timeout_s: float = 20.0
    stream_chunks_per_s: float = 0.0
    sample_share: float = 0.0
    held_out_fraction: float = 0.0
    canary_share: float = 0.0
    suffix: SuffixSource = "off"
    retention_s: float = 24 * 3600.0

    @property
    def threads(self) -> int:
        """Torch threads of an engine in this process."""
        return self.num_threads or default_threads(available_cores())


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of an engine; see TargetSettings.

    Attributes:
        max_speculative_tokens: drafted per round at most, for a request without its own
            ``num_speculative_tokens``.
        eos_token_ids: end-of-sequence tokens of the target.
        record_hidden: whether records hold the target's hidden states, which EAGLE drafts read.
        suffix_drafts: for requests that leave the number of tokens to the controller.
    """

    max_num_seqs: int
    max_model_len: int
    num_speculative_tokens: int | None
    replay_top_k: int
    prefill_chunk: int
    eos_token_ids: frozenset[int]
    prefix_cache: bool = True
    max_speculative_tokens: int = MAX_SPECULATIVE_TOKENS
    replay_branches: bool = False
    canary_share: float = 0.0
    record_hidden: bool = False
    suffix_drafts: bool = False
