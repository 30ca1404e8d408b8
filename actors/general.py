"""The name of the topic of all else, and of its expert, which every server has."""

from __future__ import annotations

GENERAL = "general"
