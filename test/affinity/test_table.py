"""The table's file, and what a prompt's signature is."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from affinity.tables import ORIGIN, make_table, prompt
from sglang_xshare.affinity.table import FORMAT, READ, Table, hash_tokenizer, load_table


def test_a_file_gives_the_table_back(tmp_path: Path) -> None:
    table, file = make_table(), tmp_path / "table.safetensors"
    table.save(file)
    loaded = load_table(file)
    assert loaded.origin == table.origin == ORIGIN
    assert np.array_equal(loaded.signatures, table.signatures)
    assert np.array_equal(loaded.samples, table.samples)
    assert (loaded.vocabulary, loaded.dimensions) == (66, 16)
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_signature_is_the_mean_at_length_one() -> None:
    table = make_table()
    tokens = [0, 1, 17, 40]
    mean = table.signatures[tokens].astype(np.float32).mean(0)
    assert table.sign(tokens) == pytest.approx(mean / np.linalg.norm(mean))


def test_a_long_prompt_is_signed_by_tokens_evenly_taken() -> None:
    table, tokens = make_table(), np.random.default_rng(0).integers(0, 64, 10 * READ + 1).tolist()
    assert table.sign(tokens) == pytest.approx(table.sign(tokens[::11]))
    assert table.sign(tokens[:READ]) != pytest.approx(table.sign(tokens[: READ + 1]))  # of which half are read
    halves = [0] * 5 * READ + [20] * 5 * READ
    assert table.sign(halves) == pytest.approx(table.sign([0, 20]), abs=1e-3)


@pytest.mark.parametrize("tokens", [[], [64, 65], [66, 2**40, -1]], ids=["none", "never seen", "beyond"])
def test_nothing_known_has_no_signature(tokens: list[int]) -> None:
    assert make_table().sign(tokens) is None


def test_ids_beyond_the_vocabulary_say_nothing() -> None:
    table = make_table()
    assert table.sign([2**40, *prompt(1), -5, 2**64 - 1, -(10**30)]) == pytest.approx(table.sign(prompt(1)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "header"),
        (b"{}" * 40, "header"),
        ({"format": "another"}, "not a table of signatures"),
        ({}, "not a table of signatures"),
        ({"format": FORMAT}, "model"),
    ],
    ids=["missing", "empty", "no safetensors", "another format", "no format", "no origin"],
)
def test_what_is_no_table_is_said_in_one_line(tmp_path: Path, content: object, said: str) -> None:
    file = tmp_path / "table.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, dict):
        table = make_table()
        save_file({"signatures": table.signatures, "samples": table.samples}, file, content)
    with pytest.raises(ValueError, match=said) as error:
        load_table(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("signatures", "samples"),
    [
        (np.zeros((8, 16), np.float32), np.zeros((2, 16), np.float16)),
        (np.zeros((8, 16), np.float16), np.zeros((2, 8), np.float16)),
        (np.full((8, 16), np.nan, np.float16), np.zeros((2, 16), np.float16)),
        (np.zeros((8,), np.float16), np.zeros((2, 16), np.float16)),
        (np.zeros((8, 16), np.float16), np.zeros((0, 16), np.float16)),
    ],
    ids=["type", "dimensions", "not finite", "no rows", "no samples"],
)
def test_numbers_that_are_none_are_refused(tmp_path: Path, signatures: np.ndarray, samples: np.ndarray) -> None:
    file = tmp_path / "table.safetensors"
    Table(signatures, samples, ORIGIN).save(file)
    with pytest.raises(ValueError, match=r"^(signatures|samples)"):
        load_table(file)


@pytest.mark.parametrize("name", ["layers", "experts", "tokens"])
@pytest.mark.parametrize("count", [0, -7])
def test_counts_below_one_are_refused(tmp_path: Path, name: str, count: int) -> None:
    file = tmp_path / "table.safetensors"
    changed: dict[str, Any] = {name: count}
    replace(make_table(), origin=replace(ORIGIN, **changed)).save(file)
    with pytest.raises(ValueError, match=f"measured on {count} {name}"):
        load_table(file)


def test_a_model_without_a_tokenizer_file_has_no_hash(tmp_path: Path, tiny_model: Path) -> None:
    assert hash_tokenizer(tmp_path) == ""
    assert len(hash_tokenizer(tiny_model)) == 64
