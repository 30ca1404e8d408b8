"""A draft's acceptance on recorded answers, teacher-forced: the same text for every draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.actors.engine.model_loader import resolve_dtype
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.batches import make_batch
from paceline.actors.training.distiller import load_state, logits_at
from paceline.actors.training.expert_evaluation import acceptance
from paceline.actors.training.losses import expected_acceptance

if TYPE_CHECKING:
    from online.world import Learner

MAX_LENGTH = 512
_BATCH = 16
_DRAFT_TOP_K = 64


@dataclass(frozen=True, slots=True)
class Scores:
    """Per record, in the records' order.

    Attributes:
        acceptance: float64 ``[R]``, chance that a served draft's token is accepted as the answer
            was really decoded: greedy ones by argmax agreement, sampled ones by sum of min(p, q).
        overlap: float64 ``[R]``, sum of min(p, q) at temperature 1, a lower bound.
    """

    acceptance: NDArray[np.float64]
    overlap: NDArray[np.float64]

    def facts(self) -> dict[str, list[float]]:
        """As JSON holds it."""
        return {
            "acceptance": [round(float(x), 5) for x in self.acceptance],
            "overlap": [round(float(x), 5) for x in self.overlap],
        }


class Judge:
    """A draft of its own, whose weights are those that are to be judged."""

    def __init__(self, draft: Path, *, device: str = "cpu", dtype: str = "auto") -> None:
        """Load the folder, in the dtype that is served on the device unless it is said."""
        self._device = torch.device(device)
        self._draft = AutoModelForCausalLM.from_pretrained(
            draft,
            dtype=resolve_dtype(dtype, self._device),
            attn_implementation="eager",
            local_files_only=True,
        ).to(self._device)
        self._draft.eval().requires_grad_(False)
        self._initial = {k: v.clone() for k, v in self._draft.state_dict().items()}

    @torch.inference_mode()
    def score(self, state: Mapping[str, Tensor] | None, records: Sequence[ReplayRecord]) -> Scores:
        """Score records under some weights, None being the initial ones.

        Raises:
            ValueError: for weights of another draft.
        """
        load_state(self._draft, self._initial if state is None else state)
        order = sorted(range(len(records)), key=lambda i: len(records[i].output_token_ids))
        found = np.zeros((2, len(records)))
        for start in range(0, len(order), _BATCH):
            part = order[start : start + _BATCH]
            found[:, part] = self._means([records[i] for i in part])
        return Scores(found[0], found[1])

    def _means(self, records: Sequence[ReplayRecord]) -> NDArray[np.float64]:
        batch = make_batch(records, MAX_LENGTH).to(self._device)
        logits = logits_at(self._draft, batch)
        served = acceptance(logits, batch, _DRAFT_TOP_K)
        lower, _ = expected_acceptance(logits, batch.top_ids, batch.top_logprobs, batch.tail_mass)
        values = torch.stack([served, lower]).double()
        sums = torch.zeros(2, len(records), dtype=torch.float64, device=self._device)
        sums.index_add_(1, batch.rows, values)
        means: NDArray[np.float64] = (
            (sums / torch.bincount(batch.rows, minlength=len(records))).cpu().numpy()
        )
        return means


def look(
    judge: Judge, learner: Learner, topic: str, tests: Sequence[ReplayRecord]
) -> dict[str, Any]:
    """What is served now, judged on the tests, and what it has cost until now."""
    version, state = learner.served(topic)
    scores = judge.score(state, tests).facts()
    facts = learner.facts()
    cost = {name: facts[name] for name in ("seconds", "micro_steps", "positions")}
    return {"weight_version": version, **scores, **cost}
