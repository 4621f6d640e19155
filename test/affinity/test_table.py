"""The table's file, and what a prompt's signature is."""

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from affinity.tables import ORIGIN, make_table, prompt
from sglang_xshare.affinity.table import READ, hash_tokenizer, load_table


def test_a_file_gives_the_table_back(tmp_path):
    table, file = make_table(), tmp_path / "table.safetensors"
    table.save(file)
    loaded = load_table(file)
    assert loaded.origin == table.origin == ORIGIN
    assert np.array_equal(loaded.signatures, table.signatures)
    assert np.array_equal(loaded.samples, table.samples)
    assert loaded.vocabulary == 66
    mask = os.umask(0)
    os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_signature_is_the_mean_at_length_one():
    table = make_table()
    tokens = [0, 1, 17, 40]
    mean = table.signatures[tokens].astype(np.float32).mean(0)
    assert table.sign(tokens) == pytest.approx(mean / np.linalg.norm(mean))


def test_a_long_prompt_is_signed_by_tokens_evenly_taken():
    table, tokens = make_table(), np.random.default_rng(0).integers(0, 64, 10 * READ + 1).tolist()
    assert table.sign(tokens) == pytest.approx(table.sign(tokens[::11]))
    assert table.sign(tokens[:READ]) != pytest.approx(table.sign(tokens[: READ + 1]))  # of which half are read
    halves = [0] * 5 * READ + [20] * 5 * READ
    assert table.sign(halves) == pytest.approx(table.sign([0, 20]), abs=1e-3)


def test_ids_never_seen_or_beyond_the_vocabulary_say_nothing():
    table = make_table()
    for tokens in ([], [64, 65], [66, 2**40, -1]):
        assert table.sign(tokens) is None
    assert table.sign([2**40, *prompt(1), -5, 2**64 - 1, -(10**30)]) == pytest.approx(table.sign(prompt(1)))


OTHER = "no table of signatures, or a table of another version"
WRONG: dict[str, tuple[object, str]] = {
    "missing": (None, "No such file"),
    "no safetensors": (b"{}" * 40, "header"),
    "another format": ({"format": "another"}, OTHER),
    "no format": ({}, OTHER),
    "a folder": (".", "a folder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_table_is_said_in_one_line(tmp_path, name):
    content, said = WRONG[name]
    file = tmp_path if content == "." else tmp_path / "table.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, dict):
        table = make_table()
        save_file({"signatures": table.signatures, "samples": table.samples}, file, content)
    with pytest.raises(ValueError, match=said) as error:
        load_table(file)
    assert "\n" not in str(error.value)


def test_a_model_without_a_tokenizer_file_has_no_hash(tmp_path, tiny_model):
    assert (hash_tokenizer(tmp_path), len(hash_tokenizer(tiny_model))) == ("", 64)
