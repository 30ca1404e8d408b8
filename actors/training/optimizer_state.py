"""AdamW's state beside the published weights, so that a restarted trainer goes on as it was.

One folder of safetensors per topic, written at every publication. What is kept are the tensors of
the torch optimizer underneath DeepSpeed: its parameters, which are the float32 masters (under
ZeRO one flat row for each group, of which each rank has a part; the weights themselves without),
and their moments; the published weights alone are rounded and have no moments. What is kept of a
flat row does not depend on the number of ranks. How it lies on disk: see
:mod:`paceline.actors.training.moments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

_MASTER = "master"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What an AdamW consists of.

    Attributes:
        tensors: ``<n>.master``, ``<n>.exp_avg``, ``<n>.exp_avg_sq`` and ``<n>.step`` of the n-th
            parameter, float32.
        steps: optimizer steps that led here.
        rate_share: share of the learning rate that the next steps have.
    """

    tensors: dict[str, Tensor]
    steps: int
    rate_share: float = 1.0

    def copied(self) -> OptimizerState:
        """The same, of tensors of its own on the CPU."""
        copies = {n: t.detach().to("cpu", copy=True) for n, t in self.tensors.items()}
        return OptimizerState(copies, self.steps, self.rate_share)


def parameter_groups(draft: Any, trained: Sequence[Tensor], decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: matrices, which are decayed, and all else, which is not; no empty ones.

    Norms, biases and embeddings are not decayed. A head that is tied to the embedding counts as
    the embedding, and so do the embedding's adapters.

    Args:
        draft: a causal LM.
        trained: its trained parameters, in the order that each group keeps.
        decay: of the matrices.
    """
    kept = {id(p) for n, p in draft.named_parameters() if p.dim() < 2 or n.endswith("bias")}
    tables = [m for m in draft.modules() if isinstance(m, nn.Embedding)]
    for table in (*tables, draft.get_input_embeddings()):
        kept |= {id(p) for p in table.parameters()}
    matrices = [p for p in trained if id(p) not in kept]
    others = [p for p in trained if id(p) in kept]
    groups = ((matrices, decay), (others, 0.0))
    return [{"params": own, "weight_decay": rate} for own, rate in groups if own]


def capture(optimizer: Optimizer, steps: int) -> OptimizerState:
    """An AdamW's state after its first step: the tensors themselves, which the next one changes."""
    tensors = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        kept = {_MASTER: parameter, **{m: optimizer.state[parameter][m] for m in _MOMENTS}}
        for name, tensor in kept.items():
            tensors[f"{number}.{name}"] = tensor.detach().float()
    return OptimizerState(tensors, steps)


def restore(optimizer: Optimizer, state: OptimizerState) -> None:
    """Put a state into an AdamW over the same parameters.

    Raises:
        ValueError: where the tensors do not fit; nothing has changed then.
    """
    parameters = _parameters(optimizer)
    shapes = {
        f"{number}.{name}": torch.Size([]) if name == "step" else parameter.shape
        for number, parameter in enumerate(parameters)
        for name in (_MASTER, *_MOMENTS)
    }
    if shapes != {name: tensor.shape for name, tensor in state.tensors.items()}:
        raise ValueError("the optimizer's state is of another draft")
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            parameter.copy_(state.tensors[f"{number}.{_MASTER}"])
            for moment in _MOMENTS:
                # AdamW wants its step count on the CPU
                place = "cpu" if moment == "step" else parameter.device
                value = state.tensors[f"{number}.{moment}"].to(place, copy=True)
                optimizer.state[parameter][moment] = value


def whole(state: OptimizerState, numels: Sequence[int], device: torch.device) -> OptimizerState:
    """Join the ranks' parts of flat rows, less DeepSpeed's padding; all ranks call it at once.

    Args:
        state: of one rank under ZeRO stage 1 or 2.
        numels: elements of each group's weights.
        device: where the ranks exchange tensors.
    """
    ranks = distributed.get_world_size()
    tensors = {}
    for name, tensor in state.tensors.items():
        if tensor.dim() and ranks > 1:
            mine = tensor.to(device)
            parts = [torch.empty_like(mine) for _ in range(ranks)]
            distributed.all_gather(parts, mine)
            tensor = torch.cat(parts).cpu()
        number = int(name.partition(".")[0])
        tensors[name] = tensor[: numels[number]] if tensor.dim() else tensor
    return OptimizerState(tensors, state.steps)


def part(state: OptimizerState, optimizer: Optimizer, numels: Sequence[int]) -> OptimizerState:
    """This rank's part of what :func:`whole` made, padded as this optimizer's rows are.

    Args:
        state: as :func:`whole` returned it.
        optimizer: of this rank, under ZeRO stage 1 or 2.
        numels: elements of each group's weights.

    Raises:
        ValueError: if the rows are others or a row has another length.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    rows = {str(number): row.numel() for number, row in enumerate(_parameters(optimizer))}
    sizes = dict(zip(rows, numels, strict=True))
    tensors = dict(state.tensors)
    for name, tensor in tensors.items():
        number = name.partition(".")[0]
        if tensor.dim() and tensor.shape != (sizes.get(number),):
            raise ValueError("the optimizer's state is of another draft")
        if tensor.dim():
            length = rows[number]
            padded = torch.nn.functional.pad(tensor, (0, ranks * length - len(tensor)))
            tensors[name] = padded[rank * length : (rank + 1) * length]
    return OptimizerState(tensors, state.steps)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
