"""Sequences of held-out text, and the answers in them."""

import pytest
import torch
from tokenizers import Tokenizer

from benchmark.quality.text import load_sequences


@pytest.fixture
def sequences(checkpoint):
    return load_sequences(checkpoint / "heldout", checkpoint, length=40, per_domain=6)


def test_sequences_are_the_text(checkpoint, sequences):
    decode = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).decode
    assert sequences.tokens.shape == (12, 40)
    assert sequences.domains == ("arithmetic",) * 6 + ("prose",) * 6
    for domain in ("arithmetic", "prose"):
        told = decode(sequences.tokens[sequences.of_domain(domain)].flatten().tolist())
        assert (checkpoint / "heldout" / f"{domain}.txt").read_text().startswith(told)


def test_answers_are_where_they_are_said_to_be(checkpoint, sequences):
    decode = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).decode
    text = decode(sequences.tokens[:6].flatten().tolist())
    told = [decode(sequences.tokens[one.row, one.start : one.stop].tolist()) for one in sequences.answers]
    # One cut by the end of a sequence is left out.
    assert text.count("\n") - 6 <= len(told) <= text.count("\n")
    problems = [line.split(" A:")[1] + "\n" for line in text.splitlines() if " A:" in line]
    assert all(answer in problems for answer in told)
    assert told[:2] == [" 0\n", " 1\n"]


def test_mixing_takes_turns_and_answers_follow(sequences):
    order = sequences.mixing()
    mixed = sequences.take(order)
    assert mixed.domains == ("arithmetic", "prose") * 6
    assert torch.equal(mixed.tokens, sequences.tokens[order])
    spans = {tuple(sequences.tokens[one.row, one.start : one.stop].tolist()) for one in sequences.answers}
    assert {tuple(mixed.tokens[one.row, one.start : one.stop].tolist()) for one in mixed.answers} == spans
    assert {one.row for one in mixed.answers} == {0, 2, 4, 6, 8, 10}


def test_too_little_text(checkpoint):
    with pytest.raises(
        ValueError, match=r"arithmetic.txt: \d+ sequences of 900 tokens in it; 50 a domain are asked for"
    ):
        load_sequences(checkpoint / "heldout", checkpoint, length=900, per_domain=50)
