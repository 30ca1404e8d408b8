"""DeepSpeed's configuration: dtype, ZeRO stage and the dictionary that it takes."""

from __future__ import annotations

from typing import Any

import torch

from paceline.actors.engine.model_loader import resolve_dtype
from paceline.actors.processor import multiplies_floats_faster
from paceline.actors.training.settings import ZeroStage

# Elements of a communication bucket: DeepSpeed's own default allocates a gigabyte.
_BUCKET = 2**23


def training_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Resolve a dtype; ``auto`` is the one that the device is fast in.

    Not float16, which would need loss scaling.
    """
    if dtype == "auto":
        floats = device.type == "cpu" and multiplies_floats_faster()
        return torch.float32 if floats else resolve_dtype(dtype, device)
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]


def zero_stage(wanted: ZeroStage | int, dtype: torch.dtype) -> int:
    """The stage to train under; ``auto`` is 1 for bfloat16 and 0 for float32.

    Raises:
        ValueError: the stage cannot work, with the reason.
    """
    if wanted == "auto":
        return 1 if dtype == torch.bfloat16 else 0
    if wanted not in (0, 1, 2):
        raise ValueError(
            f"stage {wanted} splits the weights themselves among the ranks, but every round hands "
            "a draft out whole; use 2"
        )
    return int(wanted)


def engine_config(
    *, accumulation: int, clip: float, dtype: torch.dtype, stage: int
) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Args:
        accumulation: micro-steps per optimizer step.
        clip: largest norm of a gradient.
        dtype: of the weights, bfloat16 or float32.
        stage: of ZeRO, see :func:`zero_stage`.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,  # required, though batches are made by hand
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": _BUCKET,
            "allgather_bucket_size": _BUCKET,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
