"""Medusa heads (Cai et al., arXiv 2401.10774): drafts from the target's hidden state.

Head i sees the final hidden state h from which the target's head made the latest token, and
predicts the token i + 1 positions behind that one:

    q_i = softmax(U_i (h + SiLU(W_i h)))

There is no draft model and no KV cache: a round's drafts cost one product per head, and a head does
not depend on the tokens that the heads before it proposed. The paper arranges several guesses per
head in a tree; here, as with every other draft, a round verifies one chain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.inference import inference
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.linear import StackedLinear
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.sampling import SamplingBatchCache
from paceline.actors.engine.top_tokens import most_probable_into
from paceline.actors.engine.transfer import device_tensor
from paceline.actors.speculation.costs import DraftPrefill
from paceline.actors.speculation.draft_sampling import draw_drafts, takes_most_probable
from paceline.actors.speculation.proposer import DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal, drop_non_finite

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_SLACK = 0.1  # of the logits' deviation: rounding in half precision


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """The shape of K heads.

    Attributes:
        num_heads: K, the most tokens that they draft in a round.
        hidden_size: H, the target's.
        vocab_size: V, the target's.
        own_output: whether every head has its own output matrix U_i, as in the paper: K * V * H
            parameters, about as many per head as the target's embedding. Otherwise all heads use
            the target's, and only the K * H * H parameters of the residual blocks are theirs.
    """

    num_heads: int
    hidden_size: int
    vocab_size: int
    own_output: bool = True

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the state's tensors, by name."""
        heads, hidden = self.num_heads, self.hidden_size
        own = {"output": (heads, self.vocab_size, hidden)} if self.own_output else {}
        return {"residual": (heads, hidden, hidden), **own}


class MedusaHeads(nn.Module):
    """The trainable heads."""

    def __init__(self, config: HeadsConfig, target_output: Tensor) -> None:
        """Initialize every head to the predictions of the target's head.

        Args:
            config: their shape.
            target_output: ``[V, H]``, the matrix of the target's head; not trained.
        """
        super().__init__()
        self.config = config
        shape = config.shapes()["residual"]
        self.residual = nn.Parameter(torch.zeros(shape, device=target_output.device))
        start = target_output.detach().float()
        self.output: Tensor
        if config.own_output:
            self.output = nn.Parameter(start.expand(config.num_heads, -1, -1).clone())
        else:
            self.register_buffer("output", start.expand(config.num_heads, -1, -1), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Float32 hidden states ``[N, H]`` to logits ``[K, N, V]``."""
        turned = functional.silu(hidden @ self.residual.transpose(1, 2)) + hidden
        return turned @ self.output.transpose(1, 2)


def save_heads(folder: Path, config: HeadsConfig, state: Mapping[str, Tensor]) -> None:
    """Write heads as ``config.json`` and safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"model_type": "medusa_heads", **asdict(config)}
    (folder / _CONFIG).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def load_heads(folder: Path) -> tuple[HeadsConfig, dict[str, Tensor]]:
    """Read what :func:`save_heads` wrote.

    Raises:
        ValueError: the folder holds something else, or tensors of other shapes.
        OSError: it cannot be read.
    """
    facts: dict[str, Any] = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    if facts.pop("model_type", None) != "medusa_heads":
        raise ValueError(f"{folder} holds no Medusa heads")
    try:
        config = HeadsConfig(**facts)
    except TypeError as error:
        raise ValueError(f"{folder / _CONFIG}: {error}") from error
    state = load_file(folder / _WEIGHTS)
    _check_state(config, state)
    return config, state


def _check_state(config: HeadsConfig, state: Mapping[str, Tensor]) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if found != config.shapes():
        raise ValueError(f"heads have tensors {found}, not {config.shapes()}")


class HeadStack:
    """The served heads of one draft, in the target's process and dtype.

    They propose for every row with a known hidden state.
    """

    prefilled = DraftPrefill()  # the target computes the prompt

    def __init__(
        self,
        name: str,
        config: HeadsConfig,
        state: Mapping[str, Tensor],
        target_output: Tensor,
        target_kv: KVCache,
    ) -> None:
        """Take the weights.

        Args:
            name: of the draft.
            config: the heads' shape.
            state: from :func:`load_heads`; copied.
            target_output: ``[V, H]``, the matrix of the target's head.
            target_kv: keeps the target's hidden states.

        Raises:
            ValueError: the heads do not fit the target.
        """
        if target_output.shape != (config.vocab_size, config.hidden_size):
            raise ValueError(
                f"heads {name}: made for {config.vocab_size} tokens and hidden states of "
                f"{config.hidden_size}, the target's head is {tuple(target_output.shape)}"
            )
        _check_state(config, state)
        self._target_kv = target_kv
        self.config = config
        self.names = (name,)
        self.versions = {name: 0}
        self.faulty: frozenset[str] = frozenset()
        self.device, self.dtype = target_output.device, target_output.dtype

        def linear(weight: Tensor) -> StackedLinear:
            return StackedLinear(weight.to(self.device, target_output.dtype, copy=True))

        self._residual = linear(state["residual"])
        self._output = linear(state["output"] if config.own_output else target_output[None])
        self._pack()
        self._heads = [ExpertLayout(range(k), self.device) for k in range(1, config.num_heads + 1)]
        self._shared = ExpertLayout([0], self.device)
        self._params = SamplingBatchCache(self.device)

    def _pack(self) -> None:
        self._residual.pack()
        self._output.pack()

    @inference
    def logits(self, hidden: Tensor, steps: int) -> Tensor:
        """Logits of the first ``steps`` heads: ``[B, H]`` to ``[steps, B, V]``."""
        layout = self._heads[steps - 1]
        states = hidden.expand(steps, -1, -1)
        turned = functional.silu(self._residual(states, layout)) + states
        if self.config.own_output:
            return self._output(turned, layout)
        flat = self._output(turned.view(1, -1, self.config.hidden_size), self._shared)
        return flat.view(steps, len(hidden), -1)

    @inference
    def propose(
        self, rows: Sequence[DraftRow], support: int, generator: torch.Generator
    ) -> Proposal:
        """Draft for rows of these heads; those of a single token draft nothing."""
        self.faulty = frozenset()
        ready = [i for i, row in enumerate(rows) if len(row.tokens) > 1]
        if not ready:
            return Proposal.empty(len(rows), self.device)
        drafts = self._draft([rows[i] for i in ready], support, generator)
        drafts, truncated = drop_non_finite(drafts)
        if truncated is not None:
            self.faulty = frozenset(self.versions)
        return drafts.scatter(ready, len(rows))

    def _draft(
        self, rows: Sequence[DraftRow], support: int, generator: torch.Generator
    ) -> Proposal:
        steps = min(self.config.num_heads, max(row.num_draft_tokens for row in rows))
        # The latest token came from the state of the one before.
        at = device_tensor([len(row.tokens) - 2 for row in rows], self.device)[:, None]
        hidden = self._target_kv.read_hidden([row.target_row for row in rows], at)[:, 0]
        logits = self.logits(hidden, steps)
        batch = self._params.get([row.sampling for row in rows])
        if not takes_most_probable(batch, rows, support):
            following: Iterator[Tensor] = iter(logits)
            return draw_drafts(
                lambda _: next(following)[:, None], steps, rows, batch, support, generator
            )
        ids = torch.empty(steps, len(rows), dtype=torch.int64, device=self.device)
        probs = torch.empty(steps, len(rows), device=self.device)
        most_probable_into(logits, ids, probs)
        counts = device_tensor([min(row.num_draft_tokens, steps) for row in rows], self.device)
        return Proposal.of_most_probable(ids.T, counts, probs.T)

    def step(self, rows: int) -> None:
        """Compute one head for so many rows, and wait for the device."""
        states = torch.zeros(rows, self.config.hidden_size, dtype=self.dtype, device=self.device)
        self.logits(states, 1).float().topk(1).indices.tolist()

    def release(self, request_id: str) -> None:
        """Do nothing: heads keep no state of sequences."""

    def num_uncomputed(self, request_id: str, length: int) -> int:  # noqa: ARG002 - the protocol's
        """Return 0: the target computes the prompt."""
        return 0

    def version(self, draft: str) -> int:
        """The weight_version that the heads propose with."""
        return self.versions[draft]

    def model(self, draft: str) -> int:  # noqa: ARG002 - the protocol's
        """Return 0: all names are of the same heads."""
        return 0

    def remove_candidate(self, slot: str) -> None:
        """Do nothing: heads have no candidates."""

    def load_weights(self, slot: str, weight_version: int, state: Mapping[str, Tensor]) -> None:
        """Load new weights.

        Raises:
            ValueError: the weights have another shape.
        """
        _check_state(self.config, state)
        self._residual.weight.copy_(state["residual"])
        if self.config.own_output:
            self._output.weight.copy_(state["output"])
        self._pack()
        self.versions[slot] = weight_version


@inference
def check_hidden(runner: ModelRunner) -> None:
    """Check that the target's logits are its head's output for hidden states that can be read.

    Args:
        runner: must be idle, and keep hidden states.

    Raises:
        ValueError: they are not; names the architecture.
    """
    kind = runner.models[0].config.model_type
    zero = torch.zeros(1, 1, dtype=torch.int64, device=runner.device)
    runner.kv.allocate(0, 1)
    try:
        logits = runner.forward([0], zero, zero, span=1)
        hidden = runner.kv.read_hidden([0], zero)
        rebuilt = runner.models[0].get_output_embeddings()(hidden)
    except (AttributeError, IndexError, RuntimeError) as fault:
        raise ValueError(
            f"models of type {kind} give no hidden states to heads: {fault}"
        ) from fault
    finally:
        runner.kv.free(0)
    # Bounding or scaling the logits afterwards does not change the most probable token.
    best = logits.flatten()[rebuilt.argmax()].float()
    if float(logits.max() - best) > _SLACK * float(logits.float().std()):
        raise ValueError(f"models of type {kind} do not make their logits from hidden states alone")


def stacks_of(folders: Mapping[str, Path], runner: ModelRunner) -> list[HeadStack]:
    """Load heads onto the target of ``runner``, by name.

    Raises:
        ValueError: heads of another shape, or a target whose hidden states cannot be read.
        OSError: a folder cannot be read.
    """
    check_hidden(runner)
    output = runner.models[0].get_output_embeddings().weight
    return [HeadStack(n, *load_heads(path), output, runner.kv) for n, path in folders.items()]
