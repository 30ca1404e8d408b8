"""Build an engine from settings."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paceline.actors.engine.compatibility import context_length, read_config
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.kv_cache import NUM_PADDING_BLOCKS, position_bytes
from paceline.actors.engine.model_loader import (
    load_causal_lm,
    load_tokenizer,
    resolve_device,
    target_dtype,
)
from paceline.actors.engine.model_runner import ModelRunner, kv_block_size, kv_shapes
from paceline.actors.engine.numerics import INVARIANT, VARYING, batch_invariant
from paceline.actors.engine.settings import EngineSettings, TargetSettings
from paceline.actors.engine.target_handle import ModelFacts
from paceline.actors.speculation.colocated import ColocatedProposer, ProfiledStack
from paceline.actors.speculation.draft_runner import DraftRunner
from paceline.actors.speculation.eagle import EagleRunner, EagleStack, HiddenReader, kept_hidden
from paceline.actors.speculation.experts import ExpertStack
from paceline.actors.speculation.pool.proposer import PoolProposer
from paceline.actors.speculation.profiling import build_policy
from paceline.actors.speculation.proposer import INITIAL_SUFFIX, Proposer
from paceline.actors.speculation.suffix import index as suffix_index
from paceline.actors.speculation.suffix.arm import SuffixArm
from paceline.actors.speculation.suffix.store import SuffixStore
from paceline.actors.weights.checkpoint import has_shared_head, read_architecture
from paceline.actors.weights.eagle import (
    Draft,
    EagleDraft,
    draft_vocabulary_size,
    is_eagle,
    load_draft,
    trunk_config,
)
from paceline.actors.weights.slots import candidate_of
from paceline.actors.weights.target_ends import (
    EMBEDDING,
    HEAD,
    TargetEnds,
    read_target_ends,
    shares_ends,
)

_CGROUP = Path("/sys/fs/cgroup")


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the free memory of the system, within the container's limit, in bytes.

    Args:
        meminfo: of the kernel; without it half of all memory counts as free.
        cgroup: of this process, version 2.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or no limit ("max")
        return free
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(
            line.split(" ", 1) for line in (cgroup / "memory.stat").read_text().splitlines()
        )
        used -= int(lines["inactive_file"])  # page cache that the kernel drops before it refuses
    return min(free, max(0, limit - used))


_CONTEXT_BYTES = 2**30  # of CUDA and its libraries in a process, at most; no allocator knows them


def free_gpu_memory(device: torch.device, share: float) -> int:
    """Return the bytes that this process may still take of a GPU.

    Processes that share a GPU start at the same time: what is free then is not for each of them.

    Args:
        device: the GPU.
        share: of its memory, for this process.
    """
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) + _CONTEXT_BYTES
    return max(0, min(free, int(share * total) - own))


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Memory of all drafts of an engine.

    Attributes:
        weights: bytes of all drafts, their candidate slots, and an initial copy of each folder; of
            EAGLE drafts with the rows of the head for their vocabularies, which may all differ.
        per_position: bytes of keys and values of one position in every architecture; drafts of
            one architecture share them.
    """

    weights: int = 0
    per_position: int = 0


def draft_memory(settings: TargetSettings, dtype: torch.dtype) -> DraftMemory:
    """Return the memory of the drafts that an engine loads.

    Args:
        settings: names their folders; drafts of a pool are in other processes.
        dtype: of their weights.

    Raises:
        OSError: a folder cannot be read.
    """
    if settings.placement == "pool":
        return DraftMemory()
    slots = 2 if settings.canary_share > 0.0 else 1
    weights, shapes = 0, set()
    for path, drafts in Counter(settings.drafts.values()).items():
        config = draft_config(path)
        if is_eagle(path):
            elements = _num_elements(Path(path)) + draft_vocabulary_size(path) * config.hidden_size
        else:
            without = (EMBEDDING, HEAD) if has_shared_head(config) else ()
            elements = _num_elements(Path(path), without)
        weights += (drafts * slots + 1) * elements * dtype.itemsize
        shapes.add(tuple(kv_shapes(config)))
    return DraftMemory(weights, sum(position_bytes(each, dtype) for each in shapes))


def draft_config(path: str) -> PreTrainedConfig:
    """Return a draft's config: an EAGLE draft's trunk's."""
    return trunk_config(path) if is_eagle(path) else read_architecture(path, "draft")


def _num_elements(folder: Path, without: Collection[str] = ()) -> int:
    """Count the elements of a folder's safetensors files, reading their headers only."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = set(file.keys()).difference(without)
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return total


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the end-of-sequence tokens of the generation config and the tokenizer."""
    declared = model.generation_config.eos_token_id
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None)


_MIB = 2**20
_GPU_SHARE = 0.8  # for all KV caches, of what the process may take less the drafts' weights
_CPU_SHARE = 0.4
_NON_ARCHITECTURE_KEYS = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
)


def kv_positions(
    settings: TargetSettings,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
) -> int:
    """Return the positions of the target's KV cache, over all requests.

    Args:
        settings: ``kv_cache_mb`` is in MiB; None is enough for every request's full context, but
            at most a part of the free memory. On a GPU the drafts, which are loaded later, are
            taken into account, with their keys and values.
        config: the target's.
        dtype: of keys and values.
        device: of keys and values.
        length: maximum positions of a request.

    Raises:
        ValueError: a single request would not fit.
    """
    size = kv_block_size(config, dtype, device)
    each = position_bytes(kv_shapes(config), dtype)
    if _has_eagles(settings):
        each += int(config.hidden_size) * dtype.itemsize
    block, columns = size * each, math.ceil(length / size)
    blocks = settings.max_num_seqs * columns
    if settings.kv_cache_mb is not None:
        blocks = settings.kv_cache_mb * _MIB // block - NUM_PADDING_BLOCKS
    elif device.type == "cuda":
        drafts = draft_memory(settings, dtype)
        whole = block + size * drafts.per_position
        free = free_gpu_memory(device, settings.gpu_share) - drafts.weights
        blocks = min(blocks, int(free * _GPU_SHARE) // whole - NUM_PADDING_BLOCKS)
    else:  # memory is committed as it is written, so one request is always admitted
        blocks = max(
            columns, min(blocks, int(free_memory() * _CPU_SHARE) // block - NUM_PADDING_BLOCKS)
        )
    if blocks < columns:
        least = math.ceil((columns + NUM_PADDING_BLOCKS) * block / _MIB)
        raise ValueError(
            f"target.kv_cache_mb: there is room for {max(blocks, 0) * size} positions, and one "
            f"request may have {length}: give at least {least}, or a smaller target.max_model_len"
        )
    return blocks * size


def build_stacks(
    settings: TargetSettings,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    positions: int | None = None,
    target: ModelRunner | None = None,
    read_hidden: HiddenReader | None = None,
) -> list[ExpertStack]:
    """Build a stack of drafts per architecture, with their fixed initial weights (``@0``).

    With a canary, every draft has a candidate slot too; it shares the rows. Drafts from the same
    folder share one copy of the initial weights. Every stack has a KV cache of ``positions``
    positions, None for every request's full context. All propose from the target's vocabulary,
    whatever the padding of their own. EAGLE drafts read hidden states of the ``target`` in this
    process, or by ``read_hidden``.
    """
    vocab_size = int(read_config(settings.model_path, "target")["vocab_size"])
    initial_names: dict[str, str] = {}
    for name, path in settings.drafts.items():
        initial_names.setdefault(path, name + INITIAL_SUFFIX)
    architectures: dict[str, list[tuple[str, Draft]]] = {}
    folders = [*settings.drafts.items(), *((name, path) for path, name in initial_names.items())]
    for name, path in folders:
        model: Draft
        ends: TargetEnds | None = None
        if is_eagle(path) or shares_ends(path):
            ends = _ends(settings, target, dtype, device)
        if is_eagle(path):
            model = load_draft(path, settings.model_path, dtype, device, ends).eval()
            model.requires_grad_(False)
        else:
            model = load_causal_lm(path, dtype, device, ends=ends)
        facts = {k: v for k, v in model.config.to_dict().items() if k not in _NON_ARCHITECTURE_KEYS}
        facts["eagle"] = isinstance(model, EagleDraft)
        key = json.dumps(facts, sort_keys=True, default=str)
        architectures.setdefault(key, []).append((name, model))
    stacks = []
    for experts in architectures.values():
        slots = [*experts, *_candidates(settings, experts)]
        names, models = zip(*slots, strict=True)
        rows, chunk = settings.max_num_seqs, settings.prefill_chunk
        stack: ExpertStack
        if isinstance(models[0], EagleDraft):
            if read_hidden is None:
                assert target is not None
                read_hidden = kept_hidden(target.kv)
            eagles = EagleRunner(models, rows, max_model_len, positions, vocab_size=vocab_size)
            stack = EagleStack(eagles, names, rows, read_hidden, chunk)
        else:
            runner = ModelRunner(
                models,
                rows,
                max_model_len,
                positions,
                graph_tokens=_graph_tokens(settings),
                vocab_size=vocab_size,
            )
            stack = ExpertStack(runner, names, rows, chunk)
        for name, path in settings.drafts.items():
            if initial_names[path] in names:
                stack.alias(name + INITIAL_SUFFIX, initial_names[path])
        stacks.append(stack)
    return stacks


def _ends(
    settings: TargetSettings, target: ModelRunner | None, dtype: torch.dtype, device: torch.device
) -> TargetEnds:
    """Return the target's own embedding and head; a pool reads them from its files."""
    if target is None:
        return read_target_ends(settings.model_path, device, dtype)
    model = target.models[0]
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    own = embedding if model.config.tie_word_embeddings else head
    return TargetEnds(embedding, own)


def _has_eagles(settings: TargetSettings) -> bool:
    return any(is_eagle(path) for path in settings.drafts.values())


def _candidates(
    settings: TargetSettings, experts: Sequence[tuple[str, Draft]]
) -> list[tuple[str, Draft]]:
    """Copy every expert's model for its candidate slot."""
    if settings.canary_share <= 0.0:
        return []
    return [
        (candidate_of(name), copy.deepcopy(model))
        for name, model in experts
        if name in settings.drafts
    ]


def _graph_tokens(settings: TargetSettings) -> int:
    """Return the tokens per row up to which forwards run as CUDA graphs."""
    return settings.max_speculative_tokens + 1 if settings.cuda_graphs else 0


def _numerics(settings: TargetSettings, runner: ModelRunner) -> str:
    """Return whether the target's bits depend on the batch: ``invariant`` or ``varying``.

    Raises:
        ValueError: they do, and the settings require that they do not.
    """
    if batch_invariant(runner):
        return INVARIANT
    if settings.numerics == INVARIANT:
        model = runner.models[0]
        raise ValueError(
            f"target.numerics: invariant cannot be had for {model.config.model_type} in "
            f"{model.dtype} on {runner.device}: a token's logits depend on what else is computed; "
            "set auto"
        )
    return VARYING


def suffix_arm(settings: TargetSettings) -> SuffixArm | None:
    """Return the suffix drafts of an engine; None if there are none, or nothing to index with."""
    fixed = settings.num_speculative_tokens is not None
    if settings.suffix == "off" or fixed or not suffix_index.available():
        return None
    shared = settings.suffix == "topic"
    return SuffixArm(SuffixStore(settings.retention_s, time.time) if shared else None)


def build_engine(
    settings: TargetSettings,
    pool: PoolProposer | None = None,
    beside: Callable[[ModelRunner], Sequence[ProfiledStack]] | None = None,
) -> tuple[Engine, PreTrainedTokenizerBase, ModelFacts]:
    """Load the models and build the engine.

    Args:
        settings: see TargetSettings.
        pool: proposer of drafts in a pool; None loads the drafts here.
        beside: makes further drafts of another kind that read the target's hidden states, as a
            study does; without a pool.

    Returns:
        the engine, the target's tokenizer, and facts about its model.

    Raises:
        ValueError: an unknown dtype, a KV cache for less than one request, numerics that are
            not available, or drafts of another kind beside a pool or with a draft's name.
        OSError: a model folder cannot be read.
    """
    if beside is not None and settings.placement == "pool":
        raise ValueError("drafts of another kind must be colocated")
    torch.set_num_threads(settings.threads)
    device = resolve_device(settings.device)
    dtype = target_dtype(settings.dtype, device, settings.model_path)
    tokenizer = load_tokenizer(settings.model_path)
    target = load_causal_lm(settings.model_path, dtype, device)
    max_model_len = context_length(target.config.to_dict(), settings.max_model_len)
    positions = kv_positions(settings, target.config, dtype, device, max_model_len)
    runner = ModelRunner(
        [target],
        settings.max_num_seqs,
        max_model_len,
        positions,
        graph_tokens=_graph_tokens(settings),
        keep_hidden=_has_eagles(settings) or beside is not None,
    )
    numerics = _numerics(settings, runner)
    seed = int.from_bytes(os.urandom(7), "big") if settings.seed is None else settings.seed
    generator = torch.Generator(device=device).manual_seed(seed)
    stacks = (
        []
        if pool is not None
        else build_stacks(settings, dtype, device, max_model_len, positions, runner)
    )
    others = [] if beside is None else beside(runner)
    if twice := settings.drafts.keys() & {name for stack in others for name in stack.names}:
        raise ValueError(f"two drafts have the name {min(twice)}")
    proposer: Proposer = pool or ColocatedProposer(
        [*stacks, *others], settings.draft_top_k, generator
    )
    if pool is not None and _has_eagles(settings):
        pool.keep_hidden(runner.kv)
    suffixes = suffix_arm(settings)
    policy = build_policy(
        *(settings, runner, stacks, pool, others),
        suffixes=suffixes is not None,
        num_models=proposer.num_models,
    )
    engine = Engine(
        runner=runner,
        draft_runner=DraftRunner(proposer, policy, device, time.perf_counter, suffixes),
        tokenizer=tokenizer,
        settings=EngineSettings(
            max_num_seqs=settings.max_num_seqs,
            max_model_len=max_model_len,
            num_speculative_tokens=settings.num_speculative_tokens,
            replay_top_k=settings.replay_top_k,
            replay_branches=settings.replay_branches,
            prefill_chunk=settings.prefill_chunk,
            eos_token_ids=eos_token_ids(target, tokenizer),
            prefix_cache=settings.prefix_cache,
            max_speculative_tokens=settings.max_speculative_tokens,
            canary_share=settings.canary_share,
            record_hidden=_has_eagles(settings),
            suffix_drafts=suffixes is not None,
        ),
        generator=generator,
        now=time.time,
    )
    facts = ModelFacts(
        model_type=target.config.model_type,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        max_model_len=max_model_len,
        num_speculative_tokens=settings.num_speculative_tokens,
        numerics=numerics,
        kv_block_size=runner.kv.block_size,
    )
    return engine, tokenizer, facts
