"""Names of records: an answer's, that with the number of a choice, or what was imagined from it."""

from __future__ import annotations

_IMAGINED = "imagined:"


def belongs(record: str, answer: str) -> bool:
    """Whether a record is an answer's, or was imagined from one of its prompts.

    An answer's record has its name, or that and the number of a choice.

    Args:
        record: its request_id.
        answer: as clients know it.
    """
    source = source_of(record)
    name, dash, number = source.rpartition("-")
    return answer in (record, source) or (bool(dash) and name == answer and number.isdecimal())


def imagined(source: str, mark: str) -> str:
    """Name of a record whose prompt was imagined from the beginning of another record's.

    Args:
        source: request_id of the latter.
        mark: tells several of one source apart; without a colon.
    """
    return f"{_IMAGINED}{mark}:{source}"


def is_imagined(record: str) -> bool:
    """Whether a record's prompt is nobody's request."""
    return record.startswith(_IMAGINED)


def source_of(record: str) -> str:
    """The record that an imagined one began like; any other one's own name."""
    return record.split(":", 2)[2] if is_imagined(record) and record.count(":") > 1 else record
