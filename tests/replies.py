"""Answers to the clients of a test."""

from __future__ import annotations

from typing import Any

from clients import Reply


def answered(replies: list[Reply]) -> list[Any]:
    """The answers; every request must have one."""
    assert [reply.error for reply in replies] == [None] * len(replies)
    return [reply.answer for reply in replies]
