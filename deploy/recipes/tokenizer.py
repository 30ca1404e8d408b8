"""Train the tokenizer of a new target: byte-level BPE, every digit a token of its own."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from paceline.deploy.recipes.data import ASSISTANT, BOS, EOS, USER, Row

PAD = "<pad>"
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role']=='assistant' %}"
    "{{ '<|assistant|>' + m['content'] + '</s>' }}{% else %}"
    "{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(
    rows: Sequence[Row], vocab_size: int, context: int = 1024
) -> PreTrainedTokenizerFast:
    """A tokenizer fitted to the rows' prompts and answers, with the target's chat template.

    Args:
        rows: the text; the same rows give the same tokenizer.
        vocab_size: tokens in all, the 256 bytes and 5 special tokens included.
        context: the longest input of the model in tokens.

    Raises:
        ValueError: `vocab_size` has no room for bytes and special tokens.
    """
    bpe = _trained(rows, vocab_size)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=context,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _trained(rows: Sequence[Row], vocab_size: int) -> Tokenizer:
    special = [PAD, BOS, EOS, USER, ASSISTANT]
    if vocab_size < 256 + len(special):
        raise ValueError(f"vocab_size {vocab_size} is below {256 + len(special)}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((part for row in rows for part in (row.prompt, row.response)), trainer)
    return bpe
