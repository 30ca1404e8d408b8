"""Build an expert's server from settings."""

from __future__ import annotations

import dataclasses
import os
import secrets

import torch

from paceline.actors.cores import available_cores
from paceline.actors.engine.build import (
    build_stacks,
    draft_config,
    free_gpu_memory,
    kv_positions,
)
from paceline.actors.engine.compatibility import context_length
from paceline.actors.engine.kv_cache import NUM_PADDING_BLOCKS, position_bytes
from paceline.actors.engine.model_loader import resolve_device, target_dtype
from paceline.actors.engine.model_runner import kv_block_size, kv_shapes
from paceline.actors.speculation.pool.draft_ahead import DraftAheadPolicy
from paceline.actors.speculation.pool.drafter import Drafter
from paceline.actors.speculation.pool.hidden_states import ReceivedStates
from paceline.actors.speculation.pool.server import ExpertServer
from paceline.actors.speculation.pool.settings import ExpertSettings
from paceline.actors.weights.checkpoint import read_architecture
from paceline.actors.weights.eagle import is_eagle

_PREFILL_CHUNK = 64  # tokens: a request waits for one chunk
_GPU_MEMORY_SHARE = 0.6  # of what the process may take, for the expert's KV cache


def expert_kv_positions(
    settings: ExpertSettings, dtype: torch.dtype, device: torch.device, length: int
) -> int:
    """Return the size of an expert's KV cache in positions: that of all its targets together.

    On a GPU at most what a part of the free memory holds.

    Args:
        settings: see ExpertSettings.
        dtype: of keys and values.
        device: the expert's.
        length: positions of the longest request.

    Raises:
        ValueError: a single request would not fit.
        ModelError: a model folder cannot be read.
    """
    target = read_architecture(settings.target.model_path, "target")
    # On the CPU: free memory of the expert's device does not bound the target's.
    each = kv_positions(settings.target, target, dtype, torch.device("cpu"), length)
    if device.type != "cuda":
        return settings.num_targets * each
    path = settings.target.drafts[settings.expert]
    own = draft_config(path)
    free = free_gpu_memory(device, settings.gpu_share)
    block = kv_block_size(own, dtype, device)
    blocks = int(free * _GPU_MEMORY_SHARE) // (block * position_bytes(kv_shapes(own), dtype))
    return min(settings.num_targets * each, (blocks - NUM_PADDING_BLOCKS) * block)


def spare_cores(settings: ExpertSettings, device: torch.device) -> int:
    """Return the cores that neither targets nor other experts use; a GPU needs none."""
    if device.type == "cuda":
        return settings.num_threads
    targets = settings.num_targets * settings.target.threads
    return available_cores() - targets - settings.other_cores


def build_server(settings: ExpertSettings, host: str | None = None) -> ExpertServer:
    """Load an expert and its initial weights, and serve them.

    Args:
        settings: see ExpertSettings.
        host: this node's address if targets of other nodes connect; else None.

    Raises:
        ValueError: an unknown dtype, a target without a context length, or a KV cache smaller
            than one request.
        ModelError: a model folder cannot be read.
    """
    torch.set_num_threads(settings.num_threads)
    device = resolve_device(settings.device)
    dtype = target_dtype(settings.target.dtype, device, settings.target.model_path)
    config = read_architecture(settings.target.model_path, "target")
    own = dataclasses.replace(
        settings.target,
        drafts={settings.expert: settings.target.drafts[settings.expert]},
        max_num_seqs=settings.max_sequences,
        prefill_chunk=min(settings.target.prefill_chunk, _PREFILL_CHUNK),
    )
    max_model_len = context_length(config.to_dict(), settings.target.max_model_len)
    positions = expert_kv_positions(settings, dtype, device, max_model_len)
    hidden = None
    if is_eagle(own.drafts[settings.expert]):
        hidden = ReceivedStates(int(config.hidden_size), dtype, device)
    read_hidden = None if hidden is None else hidden.read
    (stack,) = build_stacks(own, dtype, device, max_model_len, positions, read_hidden=read_hidden)
    seed = settings.target.seed
    generator = torch.Generator(device=device).manual_seed(
        int.from_bytes(os.urandom(7), "big") if seed is None else seed
    )
    drafter = Drafter(
        stack,
        support=settings.target.draft_top_k,
        generator=generator,
        max_sequences=settings.max_sequences,
        epoch=secrets.randbits(32),
        # Ahead of the target there are no hidden states to read.
        draft_ahead=DraftAheadPolicy(
            settings.draft_ahead if hidden is None else "off",
            spare_cores(settings, device),
            settings.num_threads,
        ),
        hidden=hidden,
    )
    return ExpertServer(drafter, num_threads=settings.num_threads, host=host)
