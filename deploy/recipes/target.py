"""Train a target, or continue one: AdamW with a cosine, then Muon on the matrices, down to zero.

    python -m paceline.deploy.recipes.target --data DATA --out OUT --adamw-steps 2024 \\
        --muon-steps 936
    python -m paceline.deploy.recipes.target --data DATA --init MODEL --out OUT --muon-steps 600

Stopped at any moment, the same command carries on from its last checkpoint (``OUT.checkpoint``)
and ends with the weights of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from paceline.deploy.recipes import checkpoints, data
from paceline.deploy.recipes.stdlib import library_rows
from paceline.deploy.recipes.tokenizer import train_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetRecipe:
    """All that decides the weights, together with the rows and the starting point."""

    adamw_steps: int = 0
    muon_steps: int = 0
    batch: int = 8  # blocks per step
    block: int = 512  # tokens per block
    warmup: int = 40  # steps, in each phase
    adamw_lr: float = 1.5e-3
    muon_lr: float = 0.01  # on the layers' matrices
    muon_rest_lr: float = 8e-4  # AdamW on all else in the Muon phase
    seed: int = 1
    max_answer_tokens: int | None = None
    checkpoint_every: int = 50  # steps

    @property
    def steps(self) -> int:
        """Steps of both phases together."""
        return self.adamw_steps + self.muon_steps


def new_model(
    tokenizer: Any, *, layers: int, width: int, heads: int, context: int, seed: int
) -> LlamaForCausalLM:
    """A Llama with random weights and tied embeddings over a tokenizer's vocabulary."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            num_hidden_layers=layers,
            intermediate_size=max(64, width * 8 // 3 // 64 * 64),
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def make_optimizers(
    model: nn.Module, recipe: TargetRecipe, phase: str
) -> list[torch.optim.Optimizer]:
    """The optimizers of a phase: ``adamw`` has one, ``muon`` one for matrices and one for the rest.

    Each group keeps its peak learning rate as ``peak``; `set_rates` scales it by the schedule.
    """
    betas = (0.9, 0.95)
    if phase == "adamw":
        rates = [recipe.adamw_lr]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=0.1)
        ]
    else:
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
        held = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in held]
        rates = [recipe.muon_lr, recipe.muon_rest_lr]
        optimizers = [
            torch.optim.Muon(matrices),
            torch.optim.AdamW(rest, betas=betas, weight_decay=0.0),
        ]
    for optimizer, rate in zip(optimizers, rates, strict=True):
        for group in optimizer.param_groups:
            group["peak"] = rate
    return optimizers


def set_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to its peak times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor


def phase_at(step: int, recipe: TargetRecipe) -> tuple[str, float]:
    """The phase of a step and the factor on its learning rates."""
    if step < recipe.adamw_steps:
        # A run that ends with AdamW anneals further than one that Muon takes over.
        return "adamw", checkpoints.cosine(step, recipe.adamw_steps, recipe.warmup)
    step -= recipe.adamw_steps
    return "muon", checkpoints.linear_to_zero(step, recipe.muon_steps, recipe.warmup)


def train_step(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], ids: torch.Tensor, device: str
) -> float:
    """One update on a batch of blocks [batch, block]; returns the mean loss per token in nats."""
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def train(
    model: nn.Module,
    stream: data.BlockStream,
    recipe: TargetRecipe,
    checkpoint: Path,
    *,
    stop_after: int | None = None,
    device: str = "cpu",
) -> int:
    """Run the recipe from its last checkpoint, if any, to its end.

    Args:
        model: float32, changed in place.
        stream: batches by step.
        recipe: steps, rates and seed.
        checkpoint: folder of the checkpoint, made when there is none.
        stop_after: stop when this step is done, with a checkpoint (a test's interruption).
        device: ``cpu`` or ``cuda``.

    Returns:
        The number of steps done, earlier runs included.
    """
    start, phase, optimizers = _resume(model, recipe, checkpoint, device)
    end = min(recipe.steps, stop_after or recipe.steps)
    begun, bar = time.monotonic(), tqdm(range(start, end), initial=start, total=recipe.steps)
    for step in bar:
        now, factor = phase_at(step, recipe)
        if now != phase:
            phase, optimizers = now, make_optimizers(model, recipe, now)
        set_rates(optimizers, factor)
        batch = torch.from_numpy(stream.at(step)).long().to(device)
        loss = train_step(model, optimizers, batch, device)
        bar.set_postfix_str(f"{phase} loss {loss:.3f}")
        done = step + 1
        if done % recipe.checkpoint_every == 0 or done == end:
            rate = (done - start) * batch.numel() / (time.monotonic() - begun)
            log.info(
                "step %d of %d: %s loss %.3f, %.0f tokens/s", done, recipe.steps, phase, loss, rate
            )
            checkpoints.save_checkpoint(
                checkpoint, model, optimizers, {"step": done, "phase": phase}
            )
    return end


def _resume(
    model: nn.Module, recipe: TargetRecipe, checkpoint: Path, device: str
) -> tuple[int, str, list[torch.optim.Optimizer]]:
    """Bring the model to its last checkpoint, if any; the step, its phase and optimizers."""
    state = checkpoints.read_state(checkpoint)
    start = int(state["step"]) if state else 0
    if state:
        checkpoints.load_weights(checkpoint, model)
    model.to(device).train()
    phase, _ = phase_at(start, recipe)
    optimizers = make_optimizers(model, recipe, phase)
    if state and state["phase"] == phase:
        checkpoints.load_optimizer_state(checkpoint, optimizers)
    return start, phase, optimizers


def save_model(model: Any, tokenizer: Any, out: Path) -> None:
    """Write weights (bfloat16) and tokenizer as a folder that ``from_pretrained`` reads."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="target", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of *_train.jsonl.gz, or dataset id")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--init", type=Path, help="continue from this model's weights")
    parser.add_argument("--tokenizer", type=Path, help="folder; default --init's, or a new one")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of a new tokenizer")
    parser.add_argument("--any-source", action="store_true", help="trust the rows' own topics")
    parser.add_argument("--no-stdlib", action="store_true", help="no rows from the interpreter")
    for name in ("adamw-steps", "muon-steps"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--max-answer-tokens", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--checkpoint-every", type=int, default=50)
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return parser.parse_args(argv)


def training_rows(args: argparse.Namespace) -> list[data.Row]:
    """The rows of the command line's data, with the standard library's functions if asked for."""
    rows = data.read_rows(args.data, any_source=args.any_source)
    if args.no_stdlib:
        return rows
    try:
        held_out = data.read_rows(args.data, split="test", any_source=args.any_source)
    except data.DataError:
        held_out = []
    return rows + library_rows(held_out, rows)


def _recipe(args: argparse.Namespace) -> TargetRecipe:
    return TargetRecipe(
        adamw_steps=args.adamw_steps,
        muon_steps=args.muon_steps,
        batch=args.batch,
        block=args.block,
        muon_lr=args.muon_lr,
        seed=args.seed,
        max_answer_tokens=args.max_answer_tokens,
        checkpoint_every=args.checkpoint_every,
        warmup=min(40, max(1, (args.adamw_steps or args.muon_steps) // 10)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; see the module's text."""
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    recipe = _recipe(args)
    rows = training_rows(args)
    if args.tokenizer or args.init:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.init)
    else:
        tokenizer = train_tokenizer(rows, args.vocab_size, args.context)
    sequences = data.encode_rows(rows, tokenizer, max_answer_tokens=recipe.max_answer_tokens)
    log.info("%d rows, %d tokens", len(sequences), sum(map(len, sequences)))
    if args.init:
        model = AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32)
    else:
        model = new_model(
            tokenizer,
            layers=args.layers,
            width=args.width,
            heads=args.heads,
            context=args.context,
            seed=args.seed,
        )
    torch.manual_seed(args.seed)
    stream = data.BlockStream(sequences, recipe.block, recipe.batch, recipe.seed)
    checkpoint = args.out.with_name(args.out.name + ".checkpoint")
    done = train(model, stream, recipe, checkpoint, stop_after=args.stop_after, device=args.device)
    if done == recipe.steps:
        save_model(model, tokenizer, args.out)
        log.info("written: %s", args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
