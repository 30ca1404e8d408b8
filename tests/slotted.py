"""Engines whose experts have two slots, and requests of which some are of the canary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from engines import engine_of, request, run, served, tokens_of
from tiny_models import tiny_llama
from torch import Tensor

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.linear import StackedLinear
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.slots import in_canary

SHARE = 0.5
IDS = [f"answer-{number}" for number in range(10)]
INSIDE = [name for name in IDS if in_canary("a", name, SHARE)]
OUTSIDE = [name for name in IDS if name not in INSIDE]


def state(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    model = tiny_llama(seed, layers=1)
    return {name: scale * weight for name, weight in model.state_dict().items()}


def two_slots(target_seed: int = 1, initial: bool = False, **more: Any) -> Engine:
    """The experts a, which is poor, and b, each with a slot for a candidate; a's is filled.

    With ``initial`` there are a's initial weights too.
    """
    names = {"a": 2, "b": 3, "a@candidate": 2, "b@candidate": 3, **({"a@0": 2} if initial else {})}
    drafts = {name: served(tiny_llama(seed, layers=1)) for name, seed in names.items()}
    engine = engine_of(
        served(tiny_llama(target_seed, layers=1)), [drafts], canary_share=SHARE, **more
    )
    own = state(target_seed)  # the target's weights: never rejected
    engine.updates.put(SwapWeights("a@candidate", 7, own))
    run(engine)
    return engine


def plain(name: str, **fields: Any) -> list[int]:
    engine = engine_of(served(tiny_llama(1, layers=1)), [], k=0)
    return tokens_of(run(engine, [asked(name, draft="off", **fields)])[name])


def asked(name: str, **fields: Any) -> Any:
    return request(name, [3 + len(name), 5, 6 + int(name[-1]), 7], **fields)


def outcomes(outputs: Mapping[str, Any]) -> dict[str, DraftOutcome | None]:
    return {name: parts[-1].outcome for name, parts in outputs.items()}


def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever packs weights runs out of memory at its third layer."""
    left = [3]

    def pack(_self: Any, _expert: int | None = None) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(StackedLinear, "pack", pack)
