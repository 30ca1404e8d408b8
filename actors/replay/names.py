"""Names of records: an answer's, or that with the number of a choice behind it."""

from __future__ import annotations


def belongs(record: str, answer: str) -> bool:
    """Whether a record is an answer's: it has its name, or that and the number of a choice.

    Args:
        record: its request_id.
        answer: as clients know it.
    """
    name, dash, number = record.rpartition("-")
    return record == answer or (bool(dash) and name == answer and number.isdecimal())
