"""Training of Medusa heads as in Medusa-1 (Cai et al., arXiv 2401.10774, section 2.2.1).

The target is frozen and runs once over its own answers; the heads learn, from its hidden states,
the tokens that follow:

    loss = sum over heads k of 0.8^k * cross-entropy of the token k + 1 positions behind the next
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from online.heads import MedusaHeads

_IGNORED = -100
_ROWS = 8  # sequences of one forward of the target
_WARM_UP = 20


@dataclass(frozen=True, slots=True)
class HeadTrainingSettings:
    """Settings of the heads' training.

    Attributes:
        steps: optimizer steps.
        positions: of a step.
        learning_rate: after a short warm-up; decays linearly to zero.
        decay: weight of a head's loss relative to the head before, the paper's lambda.
        clip: largest norm of a gradient.
        dtype: of the products; the weights stay float32.
        seed: of the order.
    """

    steps: int
    positions: int = 512
    learning_rate: float = 1e-3
    decay: float = 0.8
    clip: float = 1.0
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass(frozen=True, slots=True)
class HeadDataset:
    """N positions of the target's answers.

    Attributes:
        hidden: ``[N, H]`` in the target's dtype, the input of its head.
        labels: int64 ``[N, K]``, the token for head i to predict; -100 beyond the end.
    """

    hidden: Tensor
    labels: Tensor


@torch.inference_mode()
def make_dataset(
    target: PreTrainedModel,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_heads: int,
    max_length: int = 1024,
) -> HeadDataset:
    """Run the target over its own answers.

    Args:
        target: a causal LM with an attention of transformers, in eval mode.
        answers: prompt and output token ids.
        num_heads: K.
        max_length: tokens of a sequence; longer ones are truncated.

    Raises:
        ValueError: no answer has a token for the first head.
    """
    states, labels = [], []
    ordered = sorted(answers, key=lambda pair: len(pair[0]) + len(pair[1]))
    for at in range(0, len(ordered), _ROWS):
        part = ordered[at : at + _ROWS]
        rows = [[*prompt, *output][:max_length] for prompt, output in part]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=target.device)
        # Padding on the right changes nothing: attention is causal.
        hidden = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
        for row, (prompt, _), state in zip(rows, part, hidden, strict=True):
            # From the state of the last prompt token but one: its heads predict output.
            places = range(max(len(prompt) - 2, 0), len(row) - 2)
            states.append(state[places.start : places.stop])
            labels += [_following(row, place + 2, num_heads) for place in places]
    if not labels:
        raise ValueError("no answer is long enough to teach a head")
    return HeadDataset(torch.cat(states), torch.tensor(labels, device=target.device))


def _following(tokens: Sequence[int], start: int, count: int) -> list[int]:
    found = list(tokens[start : start + count])
    return found + [_IGNORED] * (count - len(found))


def medusa_loss(logits: Tensor, labels: Tensor, decay: float) -> Tensor:
    """The heads' weighted cross-entropy, a scalar.

    Args:
        logits: float ``[K, N, V]``.
        labels: int64 ``[N, K]``, -100 without one; the first head has some.
        decay: lambda.
    """
    losses = [
        decay ** (k + 1) * functional.cross_entropy(own.float(), own_labels)
        for k, (own, own_labels) in enumerate(zip(logits, labels.T, strict=True))
        if bool((own_labels != _IGNORED).any())
    ]
    return torch.stack(losses).sum()


def train_heads(
    heads: MedusaHeads,
    dataset: HeadDataset,
    settings: HeadTrainingSettings,
    progress: Callable[[float], None] = lambda _: None,
) -> None:
    """Train in place; ``progress`` is called with the loss of every step.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    optimizer = torch.optim.AdamW(heads.parameters(), weight_decay=0.0)
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.empty(0, dtype=torch.int64)
    device = dataset.hidden.device
    half = settings.dtype is not torch.float32
    for step in range(settings.steps):
        if len(order) == 0:
            order = torch.randperm(len(dataset.labels), generator=generator)
        picked, order = order[: settings.positions], order[settings.positions :]
        rate = min((step + 1) / _WARM_UP, 1.0) * (1.0 - step / settings.steps)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate
        picked = picked.to(device)
        with torch.autocast(device.type, settings.dtype, enabled=half):
            logits = heads(dataset.hidden[picked].float())
        loss = medusa_loss(logits, dataset.labels[picked], settings.decay)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the heads' loss is {float(loss.detach())} in step {step}")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(heads.parameters(), settings.clip)
        optimizer.step()
        progress(float(loss.detach()))


@torch.inference_mode()
def head_accuracy(heads: MedusaHeads, dataset: HeadDataset, positions: int = 1024) -> list[float]:
    """Accuracy of each head's most probable token, K values in [0, 1]."""
    right = torch.zeros(dataset.labels.shape[1], dtype=torch.int64)
    for at in range(0, len(dataset.labels), positions):
        labels = dataset.labels[at : at + positions]
        found = heads(dataset.hidden[at : at + positions].float()).argmax(-1)
        right += (labels == found.T).sum(0).cpu()
    known = (dataset.labels != _IGNORED).sum(0).cpu()
    return [int(hit) / max(int(count), 1) for hit, count in zip(right, known, strict=True)]
