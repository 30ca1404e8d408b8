"""Build an expert's server from settings."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
from typing import Any

import torch
from transformers import AutoConfig

from paceline.actors.engine.build import build_stacks, kv_positions
from paceline.actors.engine.compatibility import context_length
from paceline.actors.engine.kv_cache import NUM_PADDING_BLOCKS, position_bytes
from paceline.actors.engine.model_loader import resolve_device, resolve_dtype
from paceline.actors.engine.model_runner import kv_block_size, kv_shapes
from paceline.actors.speculation.pool.draft_ahead import AheadPolicy
from paceline.actors.speculation.pool.drafter import SharedDrafter
from paceline.actors.speculation.pool.server import ExpertServer
from paceline.actors.speculation.pool.settings import ExpertSettings

# Most prompt tokens that are read in one go, and that a question may thus have to wait for.
_CHUNK = 64
_GPU_SHARE = 0.6  # of its free memory, for the expert's keys and values


def expert_positions(
    settings: ExpertSettings, dtype: torch.dtype, device: torch.device, length: int
) -> int:
    """Positions that an expert's key/value memory has room for: as many as all its targets have.

    On GPUs at most what a share of the memory that is free now holds.

    Args:
        settings: see ExpertSettings.
        dtype: of keys and values.
        device: the expert's.
        length: most positions of a request.

    Raises:
        ValueError: where a single request would not fit.
        OSError: for a model folder that cannot be read.
    """
    target: Any = AutoConfig.from_pretrained(settings.target.model_path, local_files_only=True)
    targets = math.ceil(settings.max_sequences / settings.target.max_num_seqs)
    # The memory of the expert's device says nothing of the target's.
    each = kv_positions(settings.target, target, dtype, torch.device("cpu"), length)
    if device.type != "cuda":
        return targets * each
    path = settings.target.drafts[settings.expert]
    own: Any = AutoConfig.from_pretrained(path, local_files_only=True)
    free, _ = torch.cuda.mem_get_info(device)
    block = kv_block_size(own, dtype, device)
    blocks = int(free * _GPU_SHARE) // (block * position_bytes(kv_shapes(own), dtype))
    return min(targets * each, (blocks - NUM_PADDING_BLOCKS) * block)


def spare_cores(settings: ExpertSettings, device: torch.device) -> int:
    """Cores on which nobody else computes; on a GPU none are needed, and it counts its own."""
    if device.type == "cuda":
        return settings.num_threads
    return (os.cpu_count() or 1) - settings.target_cores - settings.other_cores


def build_server(settings: ExpertSettings, host: str | None = None) -> ExpertServer:
    """Load the expert and its initial weights, and serve them.

    Args:
        settings: see ExpertSettings.
        host: address of this node, where targets of others connect; else None.

    Raises:
        ValueError: for an unknown dtype, a target without a context length, or key/value memory
            for less than one request.
        OSError: for a model folder that cannot be read.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.target.dtype, device)
    config: Any = AutoConfig.from_pretrained(settings.target.model_path, local_files_only=True)
    own = dataclasses.replace(
        settings.target,
        drafts={settings.expert: settings.target.drafts[settings.expert]},
        max_num_seqs=settings.max_sequences,
        prefill_chunk=min(settings.target.prefill_chunk, _CHUNK),
    )
    max_model_len = context_length(config.to_dict(), settings.target.max_model_len)
    positions = expert_positions(settings, dtype, device, max_model_len)
    (stack,) = build_stacks(own, dtype, device, max_model_len, positions)
    seed = settings.target.seed
    generator = torch.Generator(device=device).manual_seed(
        int.from_bytes(os.urandom(7), "big") if seed is None else seed
    )
    drafter = SharedDrafter(
        stack,
        settings.expert,
        support=settings.target.draft_top_k,
        generator=generator,
        max_sequences=settings.max_sequences,
        epoch=secrets.randbits(32),
        ahead=AheadPolicy(
            settings.draft_ahead, spare_cores(settings, device), settings.num_threads
        ),
    )
    return ExpertServer(drafter, num_threads=settings.num_threads, host=host)
