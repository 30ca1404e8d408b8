"""The small models that tests serve: a target of 16M parameters, its draft, and a router.

They write the form of four kinds of answers, so that the drafts have something to learn.
"""

from __future__ import annotations

from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
TARGET, DRAFT, ROUTER = FIXTURES / "target", FIXTURES / "draft-general", FIXTURES / "router"
# Keys of the configuration.
SMALL_MODELS = {
    "target.path": str(TARGET),
    "drafts.general": str(DRAFT),
    "router.path": str(ROUTER),
}
