"""Low-rank adapters (LoRA), and loading of a state dict into a draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from paceline.actors.weights.checkpoint import copy_state, tied_names
from paceline.actors.weights.eagle import Draft, weights_for

_DOWN, _UP = "adapter_down", "adapter_up"
_Adapted = nn.Linear | nn.Embedding
_Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]


def is_adapter(name: str) -> bool:
    """Whether a name of a state dict is an adapter's."""
    return name.endswith((f".{_DOWN}", f".{_UP}"))


class Adapters:
    """Adapters of rank r on every linear layer of a draft; merged, W + (alpha / r) * up @ down.

    ``down`` is initialised as PyTorch initialises a linear layer, by its own generator, ``up`` is
    zero: new adapters change nothing. Embeddings, the head and norms stay frozen; ``embeddings``
    adapts the embedding, and the head if the two are tied.
    """

    def __init__(
        self, draft: PreTrainedModel, rank: int, alpha: float, *, embeddings: bool = False
    ) -> None:
        """Freeze the draft and attach fresh adapters.

        Args:
            draft: a causal LM.
            rank: r.
            alpha: scale of the product, times r.
            embeddings: whether the embedding is adapted too, if it is the draft's own.

        Raises:
            ValueError: for a draft without linear layers.
        """
        self._draft = draft
        self._scale = alpha / rank
        self._layers: dict[str, _Adapted] = {}
        self._hooks: list[RemovableHandle] = []
        draft.requires_grad_(False)
        head, table = draft.get_output_embeddings(), draft.get_input_embeddings()
        embeddings = embeddings and isinstance(table, nn.Embedding)  # the draft's own
        noise = torch.Generator().manual_seed(0)
        for name, module in draft.named_modules():
            if isinstance(module, nn.Linear) and module is not head:
                self._attach(name, module, rank, noise, self._linear)
            elif embeddings and module is table:
                self._attach(name, module, rank, noise, self._embedding)
        if not self._layers:
            raise ValueError(f"a {draft.config.model_type} has no linear layers to adapt")
        if embeddings and head is not None and head.weight is table.weight:
            self._hooks.append(head.register_forward_hook(self._tied_head))

    def _attach(
        self,
        name: str,
        module: nn.Linear | nn.Embedding,
        rank: int,
        noise: torch.Generator,
        hook: _Hook,
    ) -> None:
        rows, columns = module.weight.shape
        bound = 1.0 / math.sqrt(columns)
        down = torch.empty(rank, columns).uniform_(-bound, bound, generator=noise)
        weight = module.weight.detach()
        module.register_parameter(_DOWN, nn.Parameter(down.to(weight)))
        module.register_parameter(_UP, nn.Parameter(weight.new_zeros(rows, rank)))
        self._layers[name] = module
        self._hooks.append(module.register_forward_hook(hook))

    def _linear(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        thin = functional.linear(inputs[0], getattr(module, _DOWN))
        product: Tensor = self._scale * functional.linear(thin, getattr(module, _UP))
        return output + product

    def _embedding(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        thin = functional.embedding(inputs[0], getattr(module, _UP))
        product: Tensor = self._scale * (thin @ getattr(module, _DOWN))
        return output + product

    def _tied_head(self, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return self._linear(self._draft.get_input_embeddings(), inputs, output)

    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [getattr(m, name) for m in self._layers.values() for name in (_DOWN, _UP)]

    def merged(self) -> dict[str, Tensor]:
        """Copies of the draft's weights with the products added, float32 if adapted."""
        state = {n: t.detach() for n, t in self._draft.state_dict().items() if not is_adapter(n)}
        whole = {n: t.clone() for n, t in state.items()}
        shared = {t.data_ptr(): n for n, t in state.items()}
        for name, module in self._layers.items():
            down, up = (getattr(module, n).detach().float() for n in (_DOWN, _UP))
            weight = module.weight.detach().float() + self._scale * (up @ down)
            whole[f"{name}.weight"] = weight
            # state_dict names a tied tensor once per module that holds it
            twin = shared[module.weight.data_ptr()]
            whole[twin] = weight
        return whole

    def remove(self) -> None:
        """Remove the adapters; every parameter requires a gradient again."""
        for hook in self._hooks:
            hook.remove()
        for module in self._layers.values():
            for name in (_DOWN, _UP):
                delattr(module, name)
        self._hooks.clear()
        self._layers.clear()
        self._draft.requires_grad_(True)


def load_state(draft: Draft, state: Mapping[str, Tensor]) -> None:
    """Copy weights into a draft, in place.

    Raises:
        ValueError: names are missing or unknown, or shapes differ.
    """
    own = {name: weight for name, weight in draft.state_dict().items() if not is_adapter(name)}
    copy_state(own, weights_for(draft, state), tied_names(draft))
