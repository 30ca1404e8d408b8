"""What the engine accepts, and as what a request begins or goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.actors.engine.detokenizer import TextStream, special_tokens
from paceline.actors.engine.recorder import Recorder
from paceline.actors.engine.request import (
    DRAFT_OFF,
    GenerationRequest,
    ended_late,
    stopped_by_id,
)
from paceline.actors.engine.sequence import Sequence
from paceline.actors.weights.slots import slot_for


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of an engine; see TargetSettings for the words.

    ``max_speculative_tokens`` bounds what a round may draft for a request that names no number;
    ``replay_branches`` records what follows rejected tokens, too. ``canary_share`` of the
    requests use an expert's candidate while there is one.
    """

    max_num_seqs: int
    max_model_len: int
    num_speculative_tokens: int | None
    replay_top_k: int
    prefill_chunk: int
    eos_token_ids: frozenset[int]
    prefix_cache: bool = True
    max_speculative_tokens: int = 32
    replay_branches: bool = False
    canary_share: float = 0.0


def take_in(
    request: GenerationRequest,
    settings: EngineSettings,
    tokenizer: Any,
    drafts: Mapping[str, int],
    vocab_size: int,
) -> Sequence:
    """A request as the sequence that is to be decoded; one that has output goes on from there.

    Args:
        request: see GenerationRequest.
        settings: limits.
        tokenizer: of the target.
        drafts: every draft that there is now, with its weight_version.
        vocab_size: of the target.

    Raises:
        ValueError: for an empty prompt, one that leaves no room for a token, or a token that
            the target does not have: in a forward it would fail all requests.
    """
    room = settings.max_model_len - len(request.prompt_token_ids)
    if not request.prompt_token_ids or room < 1:
        raise ValueError(
            f"the prompt has {len(request.prompt_token_ids)} tokens; "
            f"1 to {settings.max_model_len - 1} can be served"
        )
    for token_ids in (request.prompt_token_ids, request.output_token_ids):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise ValueError(f"a token id is not in the target's vocabulary of {vocab_size}")
    request = stopped_by_id(request, special_tokens(tokenizer.backend_tokenizer), vocab_size)
    request = ended_late(request, settings.eos_token_ids)
    wanted = request.num_speculative_tokens
    k = settings.num_speculative_tokens if wanted is None else wanted
    if request.draft == DRAFT_OFF or request.draft not in drafts:
        k = 0
    draft = slot_for(request.draft, request.request_id, settings.canary_share, drafts)
    sequence = Sequence(
        request=request,
        text=TextStream(
            tokenizer, request.sampling.stop, request.sent_chars, request.prompt_token_ids
        ),
        max_tokens=min(request.sampling.max_tokens, room),
        num_speculative_tokens=k,
        weight_version=drafts.get(draft, 0),
        draft=draft,
        recorder=Recorder() if request.leaves_record else None,
    )
    sequence.resume(settings.eos_token_ids)
    return sequence
