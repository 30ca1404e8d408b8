"""Distil a draft from a target: forward KL on the target's own answers to some topics' prompts.

    python -m paceline.deploy.recipes.draft --data DATA --target TARGET --out OUT \\
        --topics math code --per-topic 1500 --steps 600

The target answers once (kept in ``OUT.answers.safetensors``), then the draft learns its
distribution at every answered position. Stopped at any moment, the same command carries on.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from paceline.actors.training import losses
from paceline.deploy.recipes import checkpoints, data
from paceline.deploy.recipes.answers import Answer, answer_rows
from paceline.deploy.recipes.target import save_model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftRecipe:
    """All that decides the weights, together with the target and the rows."""

    topics: tuple[str, ...] = ("math", "code")
    per_topic: int = 1000  # prompts
    sampled_share: float = 0.3  # of the prompts, answered by sampling at temperature 0.8
    max_new_tokens: int = 128
    steps: int = 300
    batch: int = 16  # answers per step
    lr: float = 3e-3
    warmup: int = 20  # steps
    layers: int = 1
    width: int = 256
    seed: int = 1
    checkpoint_every: int = 50  # steps


def new_draft(target_config: Any, recipe: DraftRecipe) -> LlamaForCausalLM:
    """A small Llama with random weights over the target's vocabulary and context."""
    torch.manual_seed(recipe.seed)
    heads = max(1, recipe.width // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=target_config.vocab_size,
            hidden_size=recipe.width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=recipe.width * 5 // 2,
            tie_word_embeddings=True,
            max_position_embeddings=target_config.max_position_embeddings,
            rms_norm_eps=1e-6,
            bos_token_id=target_config.bos_token_id,
            eos_token_id=target_config.eos_token_id,
            pad_token_id=target_config.pad_token_id,
        )
    )


def make_answers(
    target: Any, tokenizer: Any, rows: Sequence[data.Row], recipe: DraftRecipe
) -> list[Answer]:
    """Greedy answers of the target, and sampled ones for a share of the prompts."""
    share = recipe.sampled_share
    sampled = [row for i, row in enumerate(rows) if int((i + 1) * share) > int(i * share)]
    kept = {row.id for row in sampled}
    greedy = [row for row in rows if row.id not in kept]
    return [
        *answer_rows(target, tokenizer, greedy, max_new_tokens=recipe.max_new_tokens),
        *answer_rows(
            target,
            tokenizer,
            sampled,
            max_new_tokens=recipe.max_new_tokens,
            temperature=0.8,
            seed=recipe.seed,
        ),
    ]


def save_answers(path: Path, answers: Sequence[Answer]) -> None:
    """Write answers as flat arrays."""

    def flat(parts: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([i for part in parts for i in part], dtype=torch.int32)

    lengths = torch.tensor([(len(a.prompt_ids), len(a.output_ids)) for a in answers])
    save_file(
        {
            "lengths": lengths,
            "prompts": flat([a.prompt_ids for a in answers]),
            "outputs": flat([a.output_ids for a in answers]),
        },
        path,
    )


def load_answers(path: Path) -> list[Answer]:
    """Read what `save_answers` wrote; ids and topics of the rows are not kept."""
    tensors = load_file(path)
    lengths = tensors["lengths"].tolist()
    prompts = torch.split(tensors["prompts"], [p for p, _ in lengths])
    outputs = torch.split(tensors["outputs"], [n for _, n in lengths])
    return [
        Answer("", "", tuple(p.tolist()), tuple(o.tolist()))
        for p, o in zip(prompts, outputs, strict=True)
    ]


class Lesson:
    """Answers with the target's last hidden states: its exact distribution at small cost."""

    def __init__(self, target: Any, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)
        self._head = target.get_output_embeddings()
        self._hidden = [self._states(target, a) for a in tqdm(self.answers, desc="target states")]

    @staticmethod
    @torch.inference_mode()
    def _states(target: Any, answer: Answer) -> torch.Tensor:
        ids = torch.tensor([answer.prompt_ids + answer.output_ids], device=target.device)
        hidden = target.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        states: torch.Tensor = hidden[len(answer.prompt_ids) - 1 : -1].clone()
        return states

    def target_logits(self, index: int) -> torch.Tensor:
        """Float32 [output length, vocabulary] of an answer."""
        with torch.no_grad():
            logits: torch.Tensor = self._head(self._hidden[index].clone()).float()
        return logits

    def pair(self, draft: Any, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of draft and target at all output positions of some answers, [N, vocabulary]."""
        rows = [self.answers[i].prompt_ids + self.answers[i].output_ids for i in indices]
        width = max(map(len, rows))
        # Padding goes to the right, where causal attention keeps it from mattering.
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        logits = draft(input_ids=ids, use_cache=False).logits
        mine = [
            logits[n, len(self.answers[i].prompt_ids) - 1 : len(row) - 1]
            for n, (i, row) in enumerate(zip(indices, rows, strict=True))
        ]
        return torch.cat(mine).float(), torch.cat([self.target_logits(i) for i in indices])


def forward_kl(draft_logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Mean over positions of KL(target || draft) in nats, over the whole vocabulary."""
    return losses.forward_kl(draft_logits, *_whole(target_logits)).mean()


def _whole(target_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every id, its log-probability, and a tail of nothing: the target as the losses take it."""
    count, size = target_logits.shape
    ids = torch.arange(size, device=target_logits.device).expand(count, size)
    return ids, target_logits.log_softmax(-1), target_logits.new_zeros(count)


@torch.inference_mode()
def expected_acceptance(draft: Any, lesson: Lesson) -> float:
    """Mean over all positions of the sum over tokens of min(p, q), at temperature 1."""
    total, count = 0.0, 0
    for index in range(len(lesson.answers)):
        mine, theirs = lesson.pair(draft, [index])
        overlap, _ = losses.expected_acceptance(mine, *_whole(theirs))
        total, count = total + float(overlap.sum()), count + len(overlap)
    return total / count


@torch.inference_mode()
def greedy_agreement(draft: Any, lesson: Lesson) -> float:
    """Share of all positions at which draft and target find the same token likeliest."""
    hits, count = 0, 0
    for index in range(len(lesson.answers)):
        mine, theirs = lesson.pair(draft, [index])
        hits += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
        count += len(mine)
    return hits / count


def batch_at(step: int, count: int, recipe: DraftRecipe) -> list[int]:
    """Which answers a step learns from: a seeded shuffle per epoch, by seed and step alone."""
    per_epoch = max(1, count // recipe.batch)
    epoch, index = divmod(step, per_epoch)
    order = np.random.default_rng([recipe.seed, epoch]).permutation(count)
    picked: list[int] = order[index * recipe.batch : (index + 1) * recipe.batch].tolist()
    return picked


def distil(
    draft: nn.Module,
    lesson: Lesson,
    recipe: DraftRecipe,
    checkpoint: Path,
    *,
    stop_after: int | None = None,
) -> int:
    """Train the draft from its last checkpoint, if any, to the recipe's end; returns steps done."""
    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    state = checkpoints.read_state(checkpoint)
    start = int(state["step"]) if state else 0
    if state:
        checkpoints.load_weights(checkpoint, draft)
        checkpoints.load_optimizer_state(checkpoint, [optimizer])
    draft.train()
    end = min(recipe.steps, stop_after or recipe.steps)
    bar = tqdm(range(start, end), initial=start, total=recipe.steps, desc="distil")
    for step in bar:
        rate = recipe.lr * checkpoints.cosine(step, recipe.steps, recipe.warmup, floor=0.02)
        optimizer.param_groups[0]["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pair = lesson.pair(draft, batch_at(step, len(lesson.answers), recipe))
        loss = forward_kl(*pair)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix_str(f"KL {float(loss.detach()):.3f}")
        done = step + 1
        if done % recipe.checkpoint_every == 0 or done == end:
            log.info("step %d of %d: KL %.3f", done, recipe.steps, float(loss.detach()))
            checkpoints.save_checkpoint(checkpoint, draft, [optimizer], {"step": done})
    return end


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; the defaults are those of `DraftRecipe`."""
    parser = argparse.ArgumentParser(prog="draft", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of *_train.jsonl.gz, or dataset id")
    parser.add_argument("--target", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--any-source", action="store_true", help="trust the rows' own topics")
    parser.add_argument("--topics", nargs="+", default=list(DraftRecipe.topics))
    counts = "per-topic max-new-tokens steps batch layers width seed checkpoint-every"
    for name in counts.split():
        default = getattr(DraftRecipe, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=DraftRecipe.lr)
    parser.add_argument("--stop-after", type=int)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Distil as the command line says; see the module's text."""
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    recipe = DraftRecipe(
        topics=tuple(args.topics),
        per_topic=args.per_topic,
        max_new_tokens=args.max_new_tokens,
        steps=args.steps,
        batch=args.batch,
        lr=args.lr,
        layers=args.layers,
        width=args.width,
        seed=args.seed,
        checkpoint_every=args.checkpoint_every,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    kept = args.out.with_name(args.out.name + ".answers.safetensors")
    if not kept.is_file():
        rows = data.read_rows(args.data, topics=recipe.topics, any_source=args.any_source)
        rows = data.sample_rows(rows, recipe.per_topic, recipe.seed)
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_answers(kept, make_answers(target, tokenizer, rows, recipe))
    lesson = Lesson(target, load_answers(kept))
    draft = new_draft(target.config, recipe)
    log.info("%d answers; %d parameters", len(lesson.answers), draft.num_parameters())
    checkpoint = args.out.with_name(args.out.name + ".checkpoint")
    if distil(draft, lesson, recipe, checkpoint, stop_after=args.stop_after) == recipe.steps:
        save_model(draft, tokenizer, args.out)
        log.info("written: %s", args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
