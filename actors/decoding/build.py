"""Build an engine from settings: models, rows, experts."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from paceline.actors.decoding.colocated import ColocatedProposer, Expert
from paceline.actors.decoding.engine import Engine, EngineSettings
from paceline.actors.decoding.loading import (
    load_causal_lm,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from paceline.actors.decoding.proposer import INITIAL_SUFFIX
from paceline.actors.decoding.runner import ModelRunner
from paceline.actors.decoding.settings import TargetSettings


def context_length(config: Any, wanted: int | None) -> int:
    """Positions that one request may take: the model's, or fewer where that is wanted."""
    own = int(config.max_position_embeddings)
    return own if wanted is None else min(own, wanted)


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer, by the generation config and the tokenizer."""
    declared = model.generation_config.eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


def build_experts(
    settings: TargetSettings, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> dict[str, Expert]:
    """One expert per draft, and one of fixed weights per folder for the ``@0`` names."""

    def expert(path: str) -> Expert:
        model = load_causal_lm(path, dtype, device)
        rows = settings.max_num_seqs
        return Expert(ModelRunner(model, rows, max_model_len), rows)

    initial = {path: expert(path) for path in sorted(set(settings.drafts.values()))}
    experts = {name: expert(path) for name, path in settings.drafts.items()}
    frozen = {name + INITIAL_SUFFIX: initial[path] for name, path in settings.drafts.items()}
    return experts | frozen


def build_engine(settings: TargetSettings) -> tuple[Engine, Any, dict[str, Any]]:
    """Load the models and put the engine together.

    Returns:
        the engine, the target's tokenizer, and facts for ``describe``.

    Raises:
        ValueError: for an unknown dtype.
        OSError: for a model folder that cannot be read.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    tokenizer = load_tokenizer(settings.model_path)
    target = load_causal_lm(settings.model_path, dtype, device)
    max_model_len = context_length(target.config, settings.max_model_len)
    runner = ModelRunner(target, settings.max_num_seqs, max_model_len)
    seed = int.from_bytes(os.urandom(7), "big") if settings.seed is None else settings.seed
    generator = torch.Generator(device=device).manual_seed(seed)
    experts = build_experts(settings, dtype, device, max_model_len)
    engine = Engine(
        runner=runner,
        proposer=ColocatedProposer(experts, settings.draft_top_k, generator),
        tokenizer=tokenizer,
        settings=EngineSettings(
            max_num_seqs=settings.max_num_seqs,
            max_model_len=max_model_len,
            num_speculative_tokens=settings.num_speculative_tokens,
            replay_top_k=settings.replay_top_k,
            prefill_chunk=settings.prefill_chunk,
            eos_token_ids=eos_token_ids(target, tokenizer),
        ),
        generator=generator,
        now=time.time,
    )
    facts = {
        "model_type": target.config.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "max_model_len": max_model_len,
        "num_speculative_tokens": settings.num_speculative_tokens,
    }
    return engine, tokenizer, facts
