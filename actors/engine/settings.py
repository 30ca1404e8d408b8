"""Settings of a target replica: plain data that crosses process borders."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DraftPlacement = Literal["colocated", "pool"]
Numerics = Literal["auto", "invariant"]


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """How one replica decodes.

    ``drafts`` maps every expert (all topics and ``general``) to a model folder; the frozen
    initial weights of each are reachable as ``<expert>@0`` without an entry of their own.
    ``heads`` maps further drafts to folders of Medusa heads, which are colocated only.
    ``replay_top_k`` target probabilities are logged per position, with ``replay_branches`` behind
    rejected tokens too; ``draft_top_k`` bounds the support that a draft proposes from.
    ``num_speculative_tokens`` None has every round draft what measured goodput says, up to
    ``max_speculative_tokens``. ``max_model_len`` None takes the target's own limit.
    ``kv_cache_mb`` MiB hold the target's keys and values, None is enough for ``max_num_seqs``
    full contexts (on GPUs at most a part of the free memory); drafts have
    room for as many positions, on top, each expert of a pool for as many as all targets together
    (again at most a part of a GPU's free memory). ``placement`` pool has every expert in a process
    of its own, for which a round waits at most ``round_timeout_ms``. ``numerics`` invariant
    has a token's logits be the same bits in every batch, or the start fail; auto takes what is
    fastest. ``canary_share`` of the requests draft with an expert's candidate while there is one;
    above 0 every expert has a second slot of weights. ``cuda_graphs`` replays short forwards on
    GPUs. A replica that gives no sign of life for ``stall_timeout_s`` counts as hung.
    Its streams get ``stream_chunks_per_s`` together, 0 is one each after every round.
    ``warm_up`` computes once at every size that products on CPUs have, before the first request.
    ``scored_share`` of the stored requests, all with prompts of the ``held_out_fraction``, goes to
    the scorer of experts. ``max_records_per_s`` of a topic's requests are stored, None is all.
    """

    model_path: str
    drafts: dict[str, str] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int = 2
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
    scored_share: float = 0.0
    held_out_fraction: float = 0.0
    max_records_per_s: float | None = None
    canary_share: float = 0.0
    warm_up: bool = False
