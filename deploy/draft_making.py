"""``paceline draft make``: a target's first draft, without any data, and its card."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.actors.training.deepspeed_setup import prepare_environment
from paceline.actors.training.draft_maker import (
    DraftMaker,
    MakerProgress,
    MakerSettings,
    Speed,
    measure_speed,
)
from paceline.actors.weights.checkpoint import ModelError
from paceline.deploy.errors import ConfigError

_MEASURED = 12  # held-out prompts

_CARD = """# Draft of {target}

An EAGLE draft of {parameters} million parameters in {layers} layer(s), over the target's own
embedding and head, which it shares. Made by

    paceline draft make --target {target} --minutes {minutes:g} --seed {seed}

from {records} answers of the target to prompts that it made up itself, in {steps} optimizer
steps of 8 answers.

| on {held_out} held-out answers | |
|---|---|
| first, second, third drafted token is the target's most probable one | {acceptance} |
| tokens per round, one greedy request, k = {k} | {length:.2f} |
| its speed over plain decoding | {measured:.2f} (predicted {predicted:.2f}) |

The speed is of the machine that made it, on {threads} threads.
"""


def make(target: str, folder: Path, out: Path, minutes: float, seed: int, layers: int) -> str:
    """Make a draft and write its card; returns the card.

    An interrupted run goes on where it was.

    Args:
        target: as the user named it.
        folder: of the target.
        out: of the draft.
        minutes: of generation and training.
        seed: of prompts, answers and order.
        layers: of the draft.

    Raises:
        ConfigError: no draft can be made for this target.
    """
    prepare_environment()
    threads = os.cpu_count() or 1
    settings = MakerSettings(str(folder), out, minutes * 60.0, seed, threads, layers)
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("loading the target", total=settings.seconds)

        def report(now: MakerProgress) -> None:
            progress.update(
                task,
                completed=now.elapsed_s,
                description=f"{now.records} answers, {now.steps} steps, "
                f"expected acceptance {now.acceptance:.2f}",
            )

        try:
            maker = DraftMaker(settings, time.monotonic, report)
        except (ModelError, ValueError) as error:
            raise ConfigError(f"--target: {error}") from error
        maker.run()
    held_out = maker.held_out()
    if not held_out:
        raise ConfigError("--minutes: no answer is held out yet; run it again with more")
    acceptance = maker.step_acceptance(held_out)
    prompts = [tuple(record.prompt_token_ids.tolist()) for record in held_out[:_MEASURED]]
    speed = measure_speed(settings, acceptance, prompts, time.perf_counter)
    text = card(target, settings, maker, acceptance, speed)
    (out / "README.md").write_text(text, encoding="utf-8")
    shutil.rmtree(out / "making")
    return text


def card(
    target: str,
    settings: MakerSettings,
    maker: DraftMaker,
    acceptance: list[float],
    speed: Speed,
) -> str:
    """The draft's card."""
    now = maker.progress
    return _CARD.format(
        target=target,
        parameters=f"{maker.parameters() / 1e6:.1f}",
        layers=settings.layers,
        minutes=settings.seconds / 60.0,
        seed=settings.seed,
        records=now.records,
        steps=now.steps,
        held_out=len(maker.held_out()),
        acceptance=", ".join(f"{value:.3f}" for value in acceptance),
        k=speed.k,
        measured=speed.measured,
        predicted=speed.predicted,
        length=speed.mean_acceptance_length,
        threads=settings.num_threads,
    )
