"""What a draft is trained for, as plain data that costs no import of torch.

``sampling`` says whose contexts count. ``target``: every emitted position, the text that the
target answered with. ``student``: the positions at which the draft proposed, accepted or not,
and those behind its rejected tokens, where replay keeps them: the contexts that the draft itself
led to (Agarwal et al. 2306.13649). ``mixed``: both, in given shares. A record that was decoded
without a draft has no student's positions: where nothing else counts in a batch, every emitted
position does, so that a draft which is switched off still learns.

Positions are not weighted by their distance from the start of a round: rounds fall elsewhere
with every other draft and every other k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Loss = Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "lk_hybrid", "hard_label"]
Weighting = Literal["uniform", "first_rejection", "rejected_only"]
Sampling = Literal["target", "student", "mixed"]


@dataclass(frozen=True, slots=True)
class ObjectiveSettings:
    """What training minimises.

    Attributes:
        loss: per position, see losses.py; ``hard_label`` is fine-tuning on the emitted tokens.
        jsd_beta: of ``jsd``, between 0 and 1.
        weighting: ``uniform``; ``first_rejection`` counts a position whose draft token was
            rejected ``rejection_weight`` times; ``rejected_only`` counts no others.
        rejection_weight: above 0.
        sampling: whose contexts, see above.
        student_share: of the student's positions in ``mixed``, 0 to 1.
    """

    loss: Loss = "forward_kl"
    jsd_beta: float = 0.5
    weighting: Weighting = "uniform"
    rejection_weight: float = 3.0
    sampling: Sampling = "target"
    student_share: float = 0.5

    def __post_init__(self) -> None:
        """Refuse words that are not known and numbers out of range."""
        for name, known in (("loss", Loss), ("weighting", Weighting), ("sampling", Sampling)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"{name} must be one of {', '.join(get_args(known))}")
        if not 0.0 < self.jsd_beta < 1.0 or not 0.0 <= self.student_share <= 1.0:
            raise ValueError("jsd_beta and student_share lie between 0 and 1")
        if self.rejection_weight <= 0.0:
            raise ValueError("rejection_weight must be above 0")

    @property
    def needs_branches(self) -> bool:
        """Whether positions behind rejected tokens are learnt from."""
        return self.sampling != "target" and self.weighting != "rejected_only"
