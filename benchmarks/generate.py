"""Transformers' own decoding: `generate`, alone and assisted by a draft."""

from __future__ import annotations

import copy
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from decoding import Drafted, Run
from prompts import Prompt
from transformers import ContinuousBatchingConfig

_PAGE = 32
_PREFILL_TOKENS = 256  # of a step, as in Paceline
_PATIENCE_S = 120.0


def _generation_config(model: Any, temperature: float, max_tokens: int) -> Any:
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = max_tokens
    config.do_sample = temperature > 0
    if config.do_sample:
        config.temperature, config.top_k, config.top_p = temperature, 0, 1.0
    return config


def _eos(model: Any) -> set[int]:
    declared = model.generation_config.eos_token_id
    return set(declared if isinstance(declared, list) else [declared])


def _until_eos(row: list[int], eos: set[int]) -> list[int]:
    """A row up to and with its first end-of-text token; the rest is padding."""
    end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
    return row[:end]


class Generate:
    """Stock `generate` with its own cache; prompts that run together are padded on the left."""

    name = "generate"

    def __init__(self, target: Any) -> None:

        self._target = target

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[Prompt], batch: int, temperature: float, max_tokens: int
    ) -> Run:
        """See Variant. A part of ``batch`` prompts ends when its longest answer does."""
        config = _generation_config(self._target, temperature, max_tokens)
        eos, pad = _eos(self._target), config.pad_token_id
        outputs: list[list[int]] = []
        seconds = 0.0
        for start in range(0, len(prompts), batch):
            part = [prompt.token_ids for prompt in prompts[start : start + batch]]
            width = max(map(len, part))
            ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in part])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
            ids, mask = ids.to(self._target.device), mask.to(self._target.device)
            began = time.perf_counter()
            rows = self._target.generate(ids, attention_mask=mask, generation_config=config)
            answers = rows[:, width:].tolist()
            seconds += time.perf_counter() - began
            outputs += [_until_eos(row, eos) for row in answers]
        return Run(outputs, seconds)


class Continuous:
    """Transformers' continuous batching; switches the target's attention to pages."""

    name = "generate continuous"

    def __init__(self, target: Any) -> None:
        self._target = target
        with warnings.catch_warnings():  # it warns of the only name that does this now
            warnings.simplefilter("ignore", FutureWarning)
            target.set_attn_implementation("paged|sdpa")

    def run(
        self, prompts: Sequence[Prompt], batch: int, temperature: float, max_tokens: int
    ) -> Run:
        """See Variant. Its thread and pages are made before and ended after what is timed.

        Raises:
            RuntimeError: a request failed.
        """
        longest = max(len(prompt.token_ids) for prompt in prompts) + max_tokens
        # Its default takes most of the machine's memory.
        pages = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=(batch + 1) * (longest // _PAGE + 2),
            max_batch_tokens=max(_PREFILL_TOKENS, batch),
        )
        manager = self._target.init_continuous_batching(
            _generation_config(self._target, temperature, max_tokens), pages
        )
        manager.start()
        try:
            warm = manager.add_request(list(prompts[0].token_ids), max_new_tokens=2)
            self._result(manager)
            assert warm is not None
            began = time.perf_counter()
            outputs = self._answers(manager, prompts, batch)
            seconds = time.perf_counter() - began
        finally:
            manager.stop(block=True)
        eos = _eos(self._target)
        return Run([_until_eos(row, eos) for row in outputs], seconds)

    def _answers(self, manager: Any, prompts: Sequence[Prompt], batch: int) -> list[list[int]]:
        """Every prompt's tokens, ``batch`` of them in flight."""
        waiting = deque(enumerate(prompts))
        number: dict[str, int] = {}
        outputs: dict[int, list[int]] = {}

        def submit() -> None:
            at, prompt = waiting.popleft()
            number[manager.add_request(list(prompt.token_ids))] = at

        while len(number) < batch and waiting:
            submit()
        while len(outputs) < len(prompts):
            result = self._result(manager)
            outputs[number[result.request_id]] = list(result.generated_tokens)
            if waiting:
                submit()
        return [outputs[at] for at in range(len(prompts))]

    @staticmethod
    def _result(manager: Any) -> Any:
        result = manager.get_result(timeout=_PATIENCE_S)
        if result is None or result.error is not None:
            raise RuntimeError(f"continuous batching gave no answer: {result}")
        return result


class Assisted:
    """Assisted generation with the topic's expert, one prompt at a time: its only batch size.

    Args:
        name: of the variant.
        target: with transformers' attention.
        experts: topic to its draft, likewise.
        tokens: drafted per round.
    """

    def __init__(
        self,
        name: str,
        target: Any,
        experts: Mapping[str, Any],
        *,
        tokens: int,
    ) -> None:
        self.name = name
        self._target = target
        self._experts = experts
        self._configs: dict[str, Any] = {}
        for topic, expert in experts.items():
            config = copy.deepcopy(expert.generation_config)
            config.num_assistant_tokens = tokens
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            self._configs[topic] = config

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[Prompt], batch: int, temperature: float, max_tokens: int
    ) -> Run:
        """See Variant.

        Raises:
            ValueError: for a batch of more than one.
        """
        if batch != 1:
            raise ValueError("assisted generation takes one prompt at a time")
        config = _generation_config(self._target, temperature, max_tokens)
        rounds = 0

        def count(*_: object) -> None:
            nonlocal rounds
            rounds += 1

        outputs, seconds = [], 0.0
        hook = self._target.register_forward_pre_hook(count)
        try:
            for prompt in prompts:
                expert = self._experts[prompt.topic]
                expert.generation_config = self._configs[prompt.topic]
                ids = torch.tensor([prompt.token_ids], device=self._target.device)
                mask = torch.ones_like(ids)
                began = time.perf_counter()
                rows = self._target.generate(
                    ids, attention_mask=mask, generation_config=config, assistant_model=expert
                )
                outputs.append(rows[0, ids.shape[1] :].tolist())
                seconds += time.perf_counter() - began
        finally:
            hook.remove()
        tokens = sum(map(len, outputs))
        return Run(outputs, seconds, Drafted(rounds, tokens - rounds))
