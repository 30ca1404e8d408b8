"""Answers of a target in batches: the text that drafts learn from and figures are taken on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from paceline.deploy.recipes.data import Row, prompt_text


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt's token ids and those that the target gave, its end-of-text token included."""

    row_id: str
    topic: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


def loops(output_ids: Sequence[int], ngram: int = 8, times: int = 3) -> bool:
    """Whether some `ngram` tokens in a row occur `times` times or more (overlaps count)."""
    seen = Counter(tuple(output_ids[i : i + ngram]) for i in range(len(output_ids) - ngram + 1))
    return max(seen.values(), default=0) >= times


def prompt_ids_of(rows: Sequence[Row], tokenizer: Any) -> list[list[int]]:
    """Token ids of each row's prompt in the target's form."""
    texts = [prompt_text(row.prompt) for row in rows]
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def answer_rows(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 64,
    max_prompt_tokens: int = 256,
) -> list[Answer]:
    """Let the target answer the rows' prompts.

    Args:
        model: a causal LM in evaluation mode.
        tokenizer: its tokenizer.
        rows: their responses are not used.
        max_new_tokens: an answer that is longer is cut here, without its end-of-text token.
        temperature: 0 takes the likeliest token each time.
        seed: of the sampling.
        batch: prompts at a time; those of a like length go together.
        max_prompt_tokens: rows with longer prompts are left out.

    Returns:
        Answers in the order of the prompts' lengths.
    """
    encoded = _by_length(rows, tokenizer, max_prompt_tokens)
    torch.manual_seed(seed)
    answers = []
    for start in tqdm(range(0, len(encoded), batch), desc="answers", leave=False):
        part = encoded[start : start + batch]
        outputs = _generate(model, [ids for ids, _ in part], max_new_tokens, temperature)
        answers += [
            Answer(row.id, row.topic, tuple(ids), tuple(output))
            for (ids, row), output in zip(part, outputs, strict=True)
        ]
    return answers


def _by_length(
    rows: Sequence[Row], tokenizer: Any, max_prompt_tokens: int
) -> list[tuple[list[int], Row]]:
    """Prompts that are short enough, with their rows, the shortest first."""
    if not rows:
        return []
    pairs = zip(prompt_ids_of(rows, tokenizer), rows, strict=True)
    short = [(ids, row) for ids, row in pairs if len(ids) <= max_prompt_tokens]
    return sorted(short, key=lambda pair: (len(pair[0]), pair[1].id))


@torch.inference_mode()
def _generate(
    model: Any, prompts: list[list[int]], max_new_tokens: int, temperature: float
) -> list[list[int]]:
    width, pad, eos = max(map(len, prompts)), model.config.pad_token_id, model.config.eos_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **sampling)
    answers = []
    for row in out[:, width:].tolist():
        end = row.index(eos) + 1 if eos in row else len(row)
        answers.append(row[:end])
    return answers
