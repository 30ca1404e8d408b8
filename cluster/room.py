"""Which trainers must go so that waiting replicas of Serve find room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_LITTLE = 1e-6  # Ray books in ten-thousandths, and adds up in floats
_MOST = 256  # replicas that are looked at

Amounts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Demand:
    """Replicas that wait for room.

    Attributes:
        amounts: resource to what each of them needs.
        count: of replicas.
    """

    amounts: Amounts
    count: int = 1


@dataclass(frozen=True, slots=True)
class Holder:
    """A trainer for which Ray books something.

    Attributes:
        trainer: its name.
        node: where it is, None where that is not known yet.
        amounts: resource to what is booked.
    """

    trainer: str
    node: str | None
    amounts: Amounts


def leavers(
    demands: Iterable[Demand], free: Mapping[str, Amounts] | None, holders: Sequence[Holder]
) -> set[str]:
    """Trainers that make room by leaving: on each node as few as will do, on as few as can be.

    A replica that finds room, or that would find none with every trainer gone, has nobody leave.
    A trainer of unknown place leaves where the others do not suffice.

    Args:
        demands: replicas that wait.
        free: node to what nobody has booked there; None where that is not known: then all
            trainers leave that hold something which is wanted.
        holders: trainers that may leave.
    """
    wanted = [demand.amounts for demand in demands for _ in range(demand.count)][:_MOST]
    if free is None:
        return {h.trainer for h in holders if any(touch(h.amounts, a) for a in wanted)}
    left = {node: dict(amounts) for node, amounts in free.items()}
    leaving: set[str] = set()
    for amounts in wanted:
        staying = [h for h in holders if h.trainer not in leaving and touch(h.amounts, amounts)]
        found = _place(amounts, left, staying)
        if found is None:
            continue
        node, going = found
        for holder in going:
            leaving.add(holder.trainer)
            _add(left[node], holder.amounts)
        _add(left[node], amounts, -1.0)
    return leaving


def fits(amounts: Amounts, free: Amounts) -> bool:
    """Whether a node with so much free has room for these amounts."""
    return all(free.get(name, 0.0) >= need - _LITTLE for name, need in amounts.items())


def touch(held: Amounts, wanted: Amounts) -> bool:
    """Whether something is held that is wanted."""
    return any(held.get(name, 0.0) > 0.0 and need > 0.0 for name, need in wanted.items())


def _place(
    amounts: Amounts, left: Mapping[str, Amounts], staying: Sequence[Holder]
) -> tuple[str, list[Holder]] | None:
    """The node where fewest leave for it, and who they are; None where nothing helps."""
    best: tuple[str, list[Holder]] | None = None
    for node, free in left.items():
        here = [h for h in staying if h.node == node] + [h for h in staying if h.node is None]
        going = _going(amounts, free, here)
        if going is not None and (best is None or len(going) < len(best[1])):
            best = node, going
    return best


def _going(amounts: Amounts, free: Amounts, here: Sequence[Holder]) -> list[Holder] | None:
    room, going = dict(free), []
    for holder in here:
        if fits(amounts, room):
            break
        lacking = {name: need for name, need in amounts.items() if not fits({name: need}, room)}
        if touch(holder.amounts, lacking):
            going.append(holder)
            _add(room, holder.amounts)
    return going if fits(amounts, room) else None


def _add(room: dict[str, float], amounts: Amounts, sign: float = 1.0) -> None:
    for name, amount in amounts.items():
        room[name] = room.get(name, 0.0) + sign * amount
