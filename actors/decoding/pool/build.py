"""Build an expert's server from settings."""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import Any

import torch
from transformers import AutoConfig

from paceline.actors.decoding.build import build_stacks, context_length
from paceline.actors.decoding.loading import resolve_device, resolve_dtype
from paceline.actors.decoding.pool.ahead import AheadPolicy
from paceline.actors.decoding.pool.drafter import SharedDrafter
from paceline.actors.decoding.pool.server import ExpertServer
from paceline.actors.decoding.pool.settings import ExpertSettings


def build_server(settings: ExpertSettings, host: str | None = None) -> ExpertServer:
    """Load the expert and its initial weights, and serve them.

    Args:
        settings: see ExpertSettings.
        host: address of this node, where targets of others connect; else None.

    Raises:
        ValueError: for an unknown dtype, or a target without a context length.
        OSError: for a model folder that cannot be read.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.target.dtype, device)
    config: Any = AutoConfig.from_pretrained(settings.target.model_path, local_files_only=True)
    own = dataclasses.replace(
        settings.target,
        drafts={settings.expert: settings.target.drafts[settings.expert]},
        max_num_seqs=settings.max_sequences,
    )
    max_model_len = context_length(config, settings.target.max_model_len)
    (stack,) = build_stacks(own, dtype, device, max_model_len)
    seed = settings.target.seed
    generator = torch.Generator(device=device).manual_seed(
        int.from_bytes(os.urandom(7), "big") if seed is None else seed
    )
    spare = (os.cpu_count() or 1) - settings.target_cores
    drafter = SharedDrafter(
        stack,
        settings.expert,
        support=settings.target.draft_top_k,
        generator=generator,
        max_sequences=settings.max_sequences,
        epoch=secrets.randbits(32),
        ahead=AheadPolicy(settings.draft_ahead, spare, settings.num_threads),
    )
    return ExpertServer(drafter, num_threads=settings.num_threads, host=host)
