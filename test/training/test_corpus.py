"""The corpus: held-out text never leaks into training text, machines without the text are told so."""

from pathlib import Path

import pytest

from training import corpus
from training.corpus import Document


def text_of(documents: list[Document]) -> str:
    return "\n".join(document.text for document in documents)


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up Python installation of 60 modules and 60 headers that all share one long comment."""
    shared = "# A notice that every single file of this installation repeats, word for word, at its top."
    for kind, suffix in (("lib", "py"), ("include", "h")):
        (tmp_path / kind).mkdir()
        for number in range(60):
            lines = "\n".join(f"value_{number}_{line} = {line * number}" for line in range(300))
            (tmp_path / kind / f"file{number}.{suffix}").write_text(f"{shared}\n\n{lines}\n")
    monkeypatch.setattr(corpus, "TRAIN_CHARS", 200_000)
    folders = {"STDLIB": "lib", "PYTHON_HEADERS": "include", "SYSTEM_HEADERS": "absent", "PERL_MANUAL": "absent"}
    for name, folder in folders.items():
        monkeypatch.setattr(corpus, name, tmp_path / folder)
    return tmp_path


def test_held_out_text_is_not_trained_on(installation: Path) -> None:
    splits = corpus.load_corpus()
    assert set(splits) == set(corpus.DOMAINS)
    for split in splits.values():
        names = [document.name for part in (split.train, split.dev, split.heldout) for document in part]
        assert len(names) == len(set(names))
        assert min(len(split.train), len(split.dev), len(split.heldout)) > 0
        assert all(document.shippable for document in split.heldout)
    for domain in ("python", "c"):
        assert "every single file" in text_of(splits[domain].heldout)
        assert "every single file" not in text_of(splits[domain].train)
        assert "value_" in text_of(splits[domain].train)
