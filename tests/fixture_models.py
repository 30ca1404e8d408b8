"""The small models that tests serve: a target of 16M parameters and its draft.

They write the form of four kinds of answers, so that the drafts have something to learn.
"""

from __future__ import annotations

from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
TARGET, DRAFT = FIXTURES / "target", FIXTURES / "draft-general"
# Keys of the configuration.
SMALL_MODELS = {"target.path": str(TARGET), "drafts.general": str(DRAFT)}
