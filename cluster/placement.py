"""Resources that Ray books for a process of each role, and the storage that hosts share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from paceline.cluster.section import Section

_NOT_BOOKABLE = frozenset({"memory", "object_store_memory"})

# A host is assumed to have room for a second process that books at most this much.
_SMALL = 0.1

_DEVICE = 10_000  # of the smallest amount that Ray books

Amounts = dict[str, Annotated[float, Field(ge=0.0)]]
Surge = Literal["auto", "on", "off"]


class PlacementConfig(Section):
    """Per role, the Ray resources of one of its processes: ``{GPU: 0.7, serving: 0.01}``.

    ``CPU`` and ``GPU`` are Ray's own; other names are custom resources of the hosts. Without
    ``CPU`` none is booked. Without ``GPU``, target and trainer share the GPUs of one machine, and
    get none on a cluster; an expert's is ``drafts.num_gpus``. ``learning`` is for the hosts of
    shards, registry, trainer scheduler and supervisor; ``router`` for a router deployment;
    ``trainer`` for each rank of a trainer, of which the further ones book a whole GPU if any.

    On a redeployment to a cluster, ``surge`` starts new replicas of target, router and ingress
    before the old ones stop, which needs room for both; ``auto`` does so if a process books at most
    a tenth of each resource. Otherwise old ones stop first, a fifth at a time, at least one.
    """

    target: Amounts = Field(default_factory=dict)
    experts: Amounts = Field(default_factory=dict)
    router: Amounts = Field(default_factory=dict)
    ingress: Amounts = Field(default_factory=dict)
    learning: Amounts = Field(default_factory=dict)
    trainer: Amounts = Field(default_factory=dict)
    surge: Surge = "auto"

    @field_validator("surge", mode="before")
    @classmethod
    def _yaml_switch(cls, switch: object) -> object:
        return {True: "on", False: "off"}[switch] if isinstance(switch, bool) else switch

    @field_validator("target", "experts", "router", "ingress", "learning", "trainer")
    @classmethod
    def _bookable(cls, amounts: dict[str, float]) -> dict[str, float]:
        if refused := sorted(_NOT_BOOKABLE & amounts.keys()):
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
        """Whether target and trainer never share a host, by their custom resources."""
        target, trainer = _custom(self.target), _custom(self.trainer)
        return bool(target and trainer) and target.isdisjoint(trainer)


class WeightsConfig(Section):
    """Storage of versions, replay and optimizer: ``storage`` is a folder that every host sees.

    It replaces ``state_dir``, which is a folder of one machine.
    """

    storage: str | None = None


def actor_options(amounts: Mapping[str, float], num_gpus: float = 0.0) -> dict[str, Any]:
    """Ray's actor options.

    Args:
        amounts: resource to amount.
        num_gpus: default if the amounts name no GPU.
    """
    options: dict[str, Any] = {
        "num_cpus": amounts.get("CPU", 0),
        "num_gpus": amounts.get("GPU", num_gpus),
    }
    if own := {name: amounts[name] for name in sorted(_custom(amounts))}:
        options["resources"] = own
    return options


def booked(options: Mapping[str, Any]) -> dict[str, float]:
    """Resource to the amount that Ray books for these actor options, without zeros."""
    amounts = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
    amounts |= options.get("resources", {})
    return {name: float(amount) for name, amount in amounts.items() if amount > 0}


def share_of_gpus(devices: int, taken: Iterable[float], replicas: int) -> float:
    """GPUs of each of so many replicas beside other bookings; 0 if they cannot be placed.

    Ray places a fraction on one device, the fullest that has room, and books other amounts as whole
    devices.

    Args:
        devices: of the machine.
        taken: the other bookings.
        replicas: that get equal shares, at least 1.
    """
    left = _left_of_devices(devices, taken)
    if left is None:
        return 0.0
    if (unbooked := left.count(_DEVICE)) >= replicas:
        return float(unbooked // replicas)
    hundredth = _DEVICE // 100
    shares = {free // (number * hundredth) for free in left for number in range(1, replicas + 1)}
    fitting = (
        share
        for share in shares - {0}
        if sum(free // (share * hundredth) for free in left) >= replicas
    )
    return max(fitting, default=0) / 100


def _left_of_devices(devices: int, taken: Iterable[float]) -> list[int] | None:
    """What bookings leave of each device, in Ray's ten-thousandths; None if they do not fit."""
    left = [_DEVICE] * devices
    for booking in sorted(taken, reverse=True):
        whole = int(booking)
        for part in whole * [_DEVICE] or [round(booking * _DEVICE)]:
            left.sort()
            index = next((i for i, free in enumerate(left) if free >= part), None)
            if index is None:
                return None
            left[index] -= part
    return left


class Booking(NamedTuple):
    """What so many processes book each.

    Attributes:
        key: of the config, that says so.
        amounts: resource to amount.
        processes: their number.
    """

    key: str
    amounts: Mapping[str, float]
    processes: int


def find_misfit(bookings: Iterable[Booking], total: Mapping[str, float]) -> str | None:
    """The first of the bookings that does not fit on one machine beside those before it.

    Args:
        bookings: in the order in which they are served.
        total: resource to the amount that the machine has.

    Returns:
        one line that begins with its key; None if all fit.
    """
    taken: dict[str, list[float]] = {}
    for key, amounts, processes in bookings:
        for name, amount in amounts.items():
            has, others = total.get(name, 0.0), taken.setdefault(name, [])
            wanted = [*others, *processes * [amount]]
            if name == "GPU":
                fits = _left_of_devices(int(has), wanted) is not None
            else:
                fits = sum(wanted) <= has + 1 / _DEVICE
            if not fits:
                return (
                    f"{key}: {processes} x {amount:g} {name} cannot be placed: there is {has:g} on "
                    f"this machine, and other parts book {sum(others):g}"
                )
            taken[name] = wanted
    return None


def surge_percent(surge: Surge, options: Mapping[str, Any]) -> int:
    """Serve's ``max_surge_percent``: replicas of a new version that start beside the old ones.

    Args:
        surge: see PlacementConfig.
        options: of :func:`actor_options`.
    """
    fits = all(amount <= _SMALL for amount in booked(options).values())
    return 100 if surge == "on" or (surge == "auto" and fits) else 0


def _custom(amounts: Mapping[str, float]) -> set[str]:
    return {name for name, amount in amounts.items() if name not in ("CPU", "GPU") and amount > 0}
