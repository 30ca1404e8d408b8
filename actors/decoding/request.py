"""What a request asks of the engine and what it gets back: frozen, picklable, free of Ray."""

from __future__ import annotations

from dataclasses import dataclass

DRAFT_OFF = "off"
FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; the words are OpenAI's.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off. With a ``seed`` the
    text depends on the target's distributions and the seed alone (Gumbel coupling).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        """True where the most probable token is taken at every position."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    ``draft`` names an expert (a topic, ``general``), an expert's initial weights
    (``sql@0``), or ``off``. ``num_speculative_tokens`` None takes the engine's own value;
    0 is plain decoding. ``store`` False keeps everything of the request out of replay.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    topic: str = "general"
    draft: str = "general"
    num_speculative_tokens: int | None = None
    store: bool = True


@dataclass(frozen=True, slots=True)
class SpeculativeStats:
    """What speculation did for one request.

    ``acceptance_histogram[i]`` counts the speculative rounds in which exactly ``i`` draft
    tokens were accepted."""

    draft: str
    weight_version: int
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 where nothing was drafted."""
        drafted = self.num_draft_tokens
        return self.num_accepted_draft_tokens / drafted if drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per speculative round, the bonus token included; 0 without rounds."""
        steps = self.num_spec_steps
        return 1.0 + self.num_accepted_draft_tokens / steps if steps else 0.0


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of the answer; the last one carries ``finish_reason`` and ``speculative``.

    ``num_cached_tokens`` of the prompt were not computed again.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    speculative: SpeculativeStats | None = None
    num_cached_tokens: int = 0
