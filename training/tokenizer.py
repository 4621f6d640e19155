"""The tokenizer of the small checkpoints, a byte-level BPE. Every digit is one token, which helps with arithmetic."""

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
"""The template formats a chat like the arithmetic problems in the training text, for example `Q: 37+1 A: 38`."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, longest: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer. Token 0 is the end of text. `longest` is the model's context length."""
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
    """Encode documents as one stream of ids [tokens] int64.

    The stream contains an end-of-text token before, between and after the documents.
    """
    end = [tokenizer.eos_token_id]
    encodings = tokenizer.backend_tokenizer.encode_batch(list(documents))
    return torch.tensor(end + [token for encoding in encodings for token in encoding.ids + end])
