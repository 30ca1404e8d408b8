"""``paceline draft make``: a target's first draft, without any data, and its card."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.actors.engine.compatibility import read_config
from paceline.actors.training.deepspeed_setup import prepare_environment
from paceline.actors.training.draft_maker import (
    DraftMaker,
    MakerProgress,
    MakerSettings,
    Speed,
    measure_speed,
)
from paceline.actors.weights.checkpoint import ModelError
from paceline.actors.weights.eagle import is_eagle, is_made_for, trunk_config
from paceline.actors.weights.state_folder import StateFolderLockedError
from paceline.deploy.errors import ConfigError

_MEASURED = 12  # held-out prompts

_CARD = """# Draft of {target}

An EAGLE draft of {parameters} million parameters in {layers} layer(s), over the target's own
embedding and head, which it shares. It {start}. Made by

    paceline draft make --target {target} --minutes {minutes:g} --seed {seed}

from {records} answers of the target to prompts that it made up itself, in {steps} optimizer
steps of {step_records} answers.

| on {held_out} held-out answers | |
|---|---|
| first, second, third drafted token is the target's most probable one | {acceptance} |
| the same before the first step | {before} |
| tokens per round, one greedy request, k = {k} | {length:.2f} |
| its speed over plain decoding | {measured:.2f} (predicted {predicted:.2f}) |

The speed is of the machine that made it, on {device}.
"""


def start_of(learnt: Path | None, target: Path, layers: int) -> Path | None:
    """The draft to go on from: one that has learnt, if it is this target's and of this size.

    Args:
        learnt: its folder.
        target: its folder.
        layers: that the draft is to have.

    Raises:
        ConfigError: one of them cannot be read.
    """
    try:
        read_config(target, "--target")
        if learnt is None or not is_made_for(learnt, target):
            return None
        return learnt if trunk_config(learnt).num_hidden_layers == layers else None
    except (ModelError, OSError) as error:
        raise ConfigError(str(error)) from error


def make(target: str, settings: MakerSettings) -> str:
    """Make a draft and write its card; returns the card.

    An interrupted run goes on where it was, also if its draft is written and the card is not.

    Args:
        target: as the user named it.
        settings: see MakerSettings.

    Raises:
        ConfigError: no draft can be made for this target, or there.
    """
    out = settings.out
    if (out / "config.json").is_file() and not is_eagle(out):
        raise ConfigError(f"--out: {out} holds another model")
    prepare_environment()
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
        except ModelError as error:
            raise ConfigError(f"--target: {error}") from error
        except StateFolderLockedError as error:
            raise ConfigError(f"--out: another process makes a draft in {out}") from error
        except ValueError as error:
            raise ConfigError(str(error)) from error
        maker.run()
    held_out = maker.held_out()
    if not held_out:
        raise ConfigError("--minutes: no answer is held out yet; run it again with more")
    maker.write()
    acceptance, before = maker.step_acceptance(held_out)
    prompts = [tuple(record.prompt_token_ids.tolist()) for record in held_out[:_MEASURED]]
    speed = measure_speed(settings, acceptance, prompts, time.perf_counter)
    text = card(target, settings, maker, acceptance, before, speed)
    (out / "README.md").write_text(text, encoding="utf-8")
    shutil.rmtree(out / "making")
    return text


def card(
    target: str,
    settings: MakerSettings,
    maker: DraftMaker,
    acceptance: list[float],
    before: list[float],
    speed: Speed,
) -> str:
    """The draft's card."""
    now, device = maker.progress, f"{settings.num_threads} threads"
    if maker.device.type == "cuda":
        device = torch.cuda.get_device_name(maker.device)
    return _CARD.format(
        target=target,
        parameters=f"{maker.parameters() / 1e6:.1f}",
        layers=settings.layers,
        minutes=settings.seconds / 60.0,
        seed=settings.seed,
        records=now.records,
        steps=now.steps,
        held_out=len(maker.held_out()),
        acceptance=_listed(acceptance),
        before=_listed(before),
        start="went on from a draft that had learnt before"
        if maker.start
        else "started from the target's first layers",
        k=speed.k,
        measured=speed.measured,
        predicted=speed.predicted,
        length=speed.mean_acceptance_length,
        step_records=maker.step_records,
        device=device,
    )


def _listed(shares: list[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in shares)
