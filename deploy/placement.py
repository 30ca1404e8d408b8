"""What a process of each role asks Ray for, and where what must outlive a host lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator

from paceline.deploy.section import Section

_OF_RAY = frozenset({"memory", "object_store_memory"})

Amounts = dict[str, Annotated[float, Field(ge=0.0)]]


class PlacementConfig(Section):
    """Per role, the Ray resources of one of its processes: ``{GPU: 0.7, serving: 0.01}``.

    ``CPU`` and ``GPU`` are Ray's own, every other name is one that the hosts were started with.
    Without ``CPU`` none is booked. Without ``GPU`` the parts of target and trainer are reckoned
    from the GPUs that are there on one machine, and nothing on a cluster; an expert's is
    ``drafts.num_gpus``. ``learning`` are shards, registry, board and what keeps them.
    """

    target: Amounts = Field(default_factory=dict)
    experts: Amounts = Field(default_factory=dict)
    router: Amounts = Field(default_factory=dict)
    ingress: Amounts = Field(default_factory=dict)
    learning: Amounts = Field(default_factory=dict)
    trainer: Amounts = Field(default_factory=dict)

    @field_validator("*")
    @classmethod
    def _bookable(cls, amounts: dict[str, float]) -> dict[str, float]:
        if refused := sorted(_OF_RAY & amounts.keys()):
            raise ValueError(f"{refused[0]} cannot be booked here")
        return amounts

    @field_validator("experts")
    @classmethod
    def _one_place(cls, amounts: dict[str, float]) -> dict[str, float]:
        if "GPU" in amounts:
            raise ValueError("the GPU of an expert is drafts.num_gpus")
        return amounts

    @property
    def trainer_is_apart(self) -> bool:
        """Whether no host has room for both target and trainer, by what they ask for."""
        target, trainer = _custom(self.target), _custom(self.trainer)
        return bool(target and trainer) and target.isdisjoint(trainer)


class WeightsConfig(Section):
    """``storage`` is a folder that every host sees: versions, replay and optimizer lie there.

    It takes the place of ``state_dir``, which is a folder of one machine.
    """

    storage: str | None = None


def actor_options(amounts: Mapping[str, float], num_gpus: float = 0.0) -> dict[str, Any]:
    """Ray's actor options for a role.

    Args:
        amounts: resource to amount.
        num_gpus: where the amounts name no GPU.
    """
    options: dict[str, Any] = {
        "num_cpus": amounts.get("CPU", 0),
        "num_gpus": amounts.get("GPU", num_gpus),
    }
    if own := {name: amounts[name] for name in sorted(_custom(amounts))}:
        options["resources"] = own
    return options


def _custom(amounts: Mapping[str, float]) -> set[str]:
    return {name for name, amount in amounts.items() if name not in ("CPU", "GPU") and amount > 0}
