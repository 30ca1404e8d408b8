"""DeepSpeed in the process of the tests: one process group for all modules, as long as they run.

DeepSpeed does not get over the end of its process group: a second one in the process fails.
"""

from __future__ import annotations

import atexit
import os

import torch

from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def use_deepspeed(device: str = "cpu") -> None:
    """Prepare the process, whatever the environment says of ranks; a second call does nothing."""
    if torch.distributed.is_initialized():
        return
    for name in _VARIABLES:
        os.environ.pop(name, None)
    prepare_environment(device)
    forbid_compiling()
    atexit.register(_end)


def _end() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
