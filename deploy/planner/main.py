"""``paceline plan``: options in, tables out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline.deploy.errors import ConfigError
from paceline.deploy.planner.configs import read_shape
from paceline.deploy.planner.costs import Precision
from paceline.deploy.planner.hardware import PRESETS, Hardware
from paceline.deploy.planner.measured import Fit, fit_models, read_steps
from paceline.deploy.planner.plan import Plan, make_plan, to_json
from paceline.deploy.planner.speculation import Scenario

_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage and a line."""
        raise ConfigError(f"plan: {message}")


def run(argv: Sequence[str]) -> int:
    """Plan and print; returns 0.

    Raises:
        ConfigError: for options, configs or step tables that make no plan; one line.
    """
    given = _parser().parse_args(argv)
    plan = _plan(given)
    if given.plot is not None:
        _draw(plan, given.plot)
    if given.json:
        sys.stdout.write(json.dumps(to_json(plan), indent=2) + "\n")
    else:
        from rich.console import Console

        from paceline.deploy.planner.report import show

        show(plan, Console())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="paceline plan",
        description="Does speculation pay? Step times, best k and break-even batch, predicted.",
    )
    parser.add_argument("target", type=Path, help="its Hugging Face config.json, or its folder")
    parser.add_argument("draft", type=Path, help="likewise")
    parser.add_argument("--hardware", type=str.lower, choices=sorted(PRESETS))
    parser.add_argument("--steps", type=Path, help="fit the machine to measured steps (JSON)")
    parser.add_argument("--bandwidth-gbs", type=float, help="memory bandwidth, 1e9 bytes/s")
    parser.add_argument("--tflops", type=float, help="1e12 FLOP/s, dense, in the models' dtype")
    parser.add_argument("--memory-gb", type=float, help="memory of one accelerator, 1e9 bytes")
    parser.add_argument("--interconnect-gbs", type=float, help="1e9 bytes/s in one direction")
    parser.add_argument("--overhead-us", type=float, help="per layer, beyond the roofline")
    parser.add_argument("--tensor-parallel", type=_count, default=1, metavar="N")
    parser.add_argument("--draft-tensor-parallel", type=_count, metavar="N", help="default: as N")
    parser.add_argument("--weight-dtype", choices=sorted(_BYTES), help="default: bfloat16")
    parser.add_argument("--kv-dtype", choices=sorted(_BYTES), help="default: bfloat16")
    parser.add_argument("--context", type=_count, default=2048, help="cached tokens of a request")
    parser.add_argument("--batch", type=_count, default=1, help="requests at once")
    parser.add_argument("--acceptance", type=float, default=0.7, help="per drafted token, 0 to 1")
    parser.add_argument("--max-speculative-tokens", type=_count, default=8, metavar="K")
    parser.add_argument("--compare-tokens", type=_count, default=10, metavar="N")
    parser.add_argument("--largest-batch", type=_count, default=4096, help="to look for the end")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture, PNG or SVG")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, not {text!r}")
    return int(text)


def _plan(given: argparse.Namespace) -> Plan:
    target, draft = read_shape(given.target), read_shape(given.draft)
    precision = Precision(
        weight=_BYTES[given.weight_dtype or "bfloat16"], kv=_BYTES[given.kv_dtype or "bfloat16"]
    )
    fit: Fit | None = None
    if given.steps is not None:
        if given.hardware is not None:
            raise ConfigError("plan: --hardware and --steps both name a machine; give one")
        if given.weight_dtype or given.kv_dtype:
            raise ConfigError("plan: --steps has the dtypes that were measured; give no other")
        steps = read_steps(given.steps)
        fit, precision = (
            fit_models(target, draft, steps, f"fitted to {given.steps}"),
            steps.precision,
        )
    machine = _hardware(given, fit)
    degree = given.tensor_parallel
    draft_degree = given.draft_tensor_parallel or degree
    scenario = Scenario(
        target=target,
        draft=draft,
        target_hardware=dataclasses.replace(machine, tensor_parallel=degree),
        draft_hardware=dataclasses.replace(machine, tensor_parallel=draft_degree),
        precision=precision,
        context=given.context,
        acceptance=given.acceptance,
    )
    return make_plan(
        scenario,
        batch=given.batch,
        max_k=given.max_speculative_tokens,
        limit=given.largest_batch,
        tokens=given.compare_tokens,
        fit=fit,
    )


def _hardware(given: argparse.Namespace, fit: Fit | None) -> Hardware:
    """The preset or the fitted machine, with what the options say over it."""
    stated = {
        "bandwidth": _times(given.bandwidth_gbs, 1e9),
        "flops": _times(given.tflops, 1e12),
        "memory_bytes": _times(given.memory_gb, 1e9),
        "interconnect": _times(given.interconnect_gbs, 1e9),
        "overhead_s": _times(given.overhead_us, 1e-6),
    }
    known: dict[str, Any] = {key: value for key, value in stated.items() if value is not None}
    if fit is not None:
        return dataclasses.replace(fit.hardware, **known)
    if given.hardware is not None:
        return dataclasses.replace(PRESETS[given.hardware], **known)
    if not {"bandwidth", "flops"} <= known.keys():
        raise ConfigError("plan: give --hardware, or --steps, or --bandwidth-gbs and --tflops")
    return Hardware("custom", **known)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _draw(plan: Plan, path: Path) -> None:
    from paceline.deploy.planner.plot import draw

    try:
        draw(plan, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan: --plot: {' '.join(str(error).split())}") from None
