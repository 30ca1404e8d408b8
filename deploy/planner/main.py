"""``paceline plan``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.actors.engine.settings import MAX_SPECULATIVE_TOKENS
from paceline.deploy.errors import ConfigError
from paceline.deploy.planner.models import read_shape
from paceline.deploy.planner.roofline import (
    PRESETS,
    Fit,
    Hardware,
    Precision,
    fit_models,
    read_steps,
)
from paceline.deploy.planner.speculation import Plan, Scenario, make_plan, to_json

Dtype = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4"]
Machine = Literal["h100", "h200", "a100", "l40s", "cpu"]
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


def plan(
    target: Annotated[Path, typer.Argument(help="Hugging Face config.json, or its folder")],
    draft: Annotated[Path, typer.Argument(help="Likewise")],
    hardware: Annotated[Machine | None, typer.Option(case_sensitive=False)] = None,
    steps: Annotated[
        Path | None, typer.Option(help="Fit the machine to measured steps (JSON)")
    ] = None,
    bandwidth_gbs: Annotated[
        float | None, typer.Option(help="Memory bandwidth, 1e9 bytes/s")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="1e12 FLOP/s, dense, in the models' dtype")
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(help="Memory of one accelerator, 1e9 bytes")
    ] = None,
    interconnect_gbs: Annotated[
        float | None, typer.Option(help="1e9 bytes/s in one direction")
    ] = None,
    overhead_us: Annotated[
        float | None, typer.Option(help="Per layer, beyond the roofline")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1)] = 1,
    draft_tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Default: as the target")
    ] = None,
    weight_dtype: Annotated[Dtype | None, typer.Option(help="Default: bfloat16")] = None,
    kv_dtype: Annotated[Dtype | None, typer.Option(help="Default: bfloat16")] = None,
    context: Annotated[int, typer.Option(min=1, help="Cached tokens of a request")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Concurrent requests")] = 1,
    acceptance: Annotated[float, typer.Option(help="Per draft token, 0 to 1")] = 0.7,
    max_speculative_tokens: Annotated[int, typer.Option(min=1, max=MAX_SPECULATIVE_TOKENS)] = 8,
    compare_tokens: Annotated[int, typer.Option(min=1)] = 10,
    largest_batch: Annotated[
        int, typer.Option(min=1, help="Largest batch of the search for the break-even")
    ] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture, PNG or SVG")] = None,
) -> int:
    """Predict if speculation pays on a machine.

    Prints step times, the best k and the break-even batch.
    """
    target_shape, draft_shape = read_shape(target), read_shape(draft)
    if target_shape.fuse_parameters:
        raise ConfigError(f"plan: {target} is a draft and needs a target's hidden states")
    precision = Precision(
        weight=_BYTES[weight_dtype or "bfloat16"], kv=_BYTES[kv_dtype or "bfloat16"]
    )
    fit: Fit | None = None
    if steps is not None:
        if hardware is not None:
            raise ConfigError("plan: --hardware and --steps both name a machine; give one")
        if weight_dtype or kv_dtype:
            raise ConfigError("plan: --steps has the dtypes that were measured; give no other")
        measured = read_steps(steps)
        fit = fit_models(target_shape, draft_shape, measured, f"fitted to {steps}")
        precision = measured.precision
    machine = _hardware(
        hardware,
        fit,
        bandwidth=_times(bandwidth_gbs, 1e9),
        flops=_times(tflops, 1e12),
        memory_bytes=_times(memory_gb, 1e9),
        interconnect=_times(interconnect_gbs, 1e9),
        overhead_s=_times(overhead_us, 1e-6),
    )
    draft_degree = draft_tensor_parallel or tensor_parallel
    scenario = Scenario(
        target=target_shape,
        draft=draft_shape,
        target_hardware=dataclasses.replace(machine, tensor_parallel=tensor_parallel),
        draft_hardware=dataclasses.replace(machine, tensor_parallel=draft_degree),
        precision=precision,
        context=context,
        acceptance=acceptance,
    )
    found = make_plan(
        scenario,
        batch=batch,
        max_k=max_speculative_tokens,
        limit=largest_batch,
        tokens=compare_tokens,
        fit=fit,
    )
    if plot is not None:
        _draw(found, plot)
    if as_json:
        sys.stdout.write(json.dumps(to_json(found), indent=2) + "\n")
    else:
        from rich.console import Console

        from paceline.deploy.planner.report import show

        show(found, Console())
    return 0


def _hardware(name: Machine | None, fit: Fit | None, **options: float | None) -> Hardware:
    """The preset or the fitted machine, overridden by the options."""
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if fit is not None:
        return dataclasses.replace(fit.hardware, **given)
    if name is not None:
        return dataclasses.replace(PRESETS[name], **given)
    if not {"bandwidth", "flops"} <= given.keys():
        raise ConfigError("plan: give --hardware, or --steps, or --bandwidth-gbs and --tflops")
    return Hardware("custom", **given)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _draw(found: Plan, path: Path) -> None:
    from paceline.deploy.planner.report import draw

    try:
        draw(found, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan: --plot: {' '.join(str(error).split())}") from None
