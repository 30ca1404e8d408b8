"""Where tokens come from, as answers say it: a pure function."""

from __future__ import annotations

from paceline.actors.decoding.request import GenerationChunk
from paceline.deploy.openai_answers import TokenOriginEntry
from paceline.deploy.token_names import TokenNames


def token_origins(chunk: GenerationChunk, names: TokenNames) -> list[TokenOriginEntry] | None:
    """An entry per token of an answer or a piece of one; None where none were asked for."""
    if chunk.origins is None:
        return None
    entries = []
    for token_id, item in zip(chunk.token_ids, chunk.origins, strict=True):
        rejected = item.rejected_token_id
        entries.append(
            TokenOriginEntry(
                token=names.name(token_id).text,
                text_offset=item.text_offset,
                origin=item.origin,
                draft=item.draft,
                weight_version=item.weight_version,
                target_probability=item.target_probability,
                acceptance_probability=item.acceptance_probability,
                rejected_token=None if rejected is None else names.name(rejected).text,
            )
        )
    return entries
