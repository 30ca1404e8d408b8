"""Small random models and a tokenizer, made on the spot: real transformers, no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = [
    "Write a function to add two numbers and return the sum.",
    "SELECT name, age FROM people WHERE age > 30 ORDER BY name;",
    "List all files, newest first: `ls -lt path/to/directory`",
    "Ann has 12 apples. She buys 30 more. How many apples has Ann now? 12 + 30 = 42.",
    "Zwölf Käse, naïve café ☕ 漢字",
]
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role']=='assistant' %}"
    "{{ '<|assistant|>' + m['content'] + '</s>' }}{% else %}{{ '<|user|>' + m['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the special tokens of the small target."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_llama(
    seed: int, *, hidden: int = 32, layers: int = 2, vocab: int = 300, **more: Any
) -> Any:
    """A random Llama with peaked distributions: one token is clearly the most probable."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=more.pop("max_position_embeddings", 128),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=more.pop("initializer_range", 0.3),
        **more,
    )
    return LlamaForCausalLM(config).eval().float()


def save_tiny(folder: Path, seed: int, *, tokenizer: bool = True, **more: Any) -> Path:
    """Write a tiny model (and the tokenizer) as a model folder."""
    tiny_llama(seed, **more).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder
