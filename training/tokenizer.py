"""The small checkpoints' tokenizer: byte-level BPE with single digits, which makes arithmetic learnable."""

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = """\
{% for message in messages %}
{% if message['role'] == 'user' %}{{ 'Q: ' + message['content'] + ' A:' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + '\\n' }}
{%- else %}{{ message['content'] + '\\n' }}
{%- endif %}
{% endfor %}
"""
"""Questions and answers as the arithmetic of the corpus writes them, `Q: 37+1 A: 38`: what these models can answer."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, longest: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab_size` tokens; id 0 ends a document. `longest` is the model's context."""
    tokenizer = Tokenizer(models.BPE())
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        model_max_length=longest,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: Iterable[str]) -> Tensor:
    """Return one stream of ids [tokens] int64, with an end of text before, between and after the documents."""
    end = [tokenizer.eos_token_id]
    encodings = tokenizer.backend_tokenizer.encode_batch(list(documents))
    return torch.tensor(end + [token for encoding in encodings for token in encoding.ids + end])
