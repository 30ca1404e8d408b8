"""Without a GPU nothing here can be seen: every test is skipped, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed_process import use_deepspeed

_HERE = Path(__file__).parent
_NONE = pytest.mark.skip(reason="no GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder on a machine without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(_NONE)


@pytest.fixture(scope="session")
def deepspeed() -> None:
    """DeepSpeed is ready in this process."""
    use_deepspeed("cuda")
