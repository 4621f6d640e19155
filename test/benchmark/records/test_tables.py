"""Marked tables in pages: written from the records, and told where they differ, lack a record or name nothing."""

import json
import shutil

import pytest

from benchmark.common.paths import RESULTS
from benchmark.records import history
from benchmark.records.experiments import EXPERIMENTS
from benchmark.records.pages import check_tables, write_tables
from benchmark.records.pictures import PICTURES, check_pictures, write_pictures
from benchmark.records.tables import _read

OLD = {"serving": "old\n", "quality": ""}


@pytest.fixture
def results(tmp_path):
    """A copy of the project's records, which a test may change."""
    _read.cache_clear()
    shutil.copytree(RESULTS, tmp_path / "benchmark" / "results")
    yield tmp_path / "benchmark" / "results"
    _read.cache_clear()


@pytest.fixture
def page(tmp_path):
    """A page at the top that shows two tables."""
    page = tmp_path / "README.md"
    serving, quality = (f"<!-- table: {name} -->\n{old}<!-- end table -->" for name, old in OLD.items())
    page.write_text(f"# Title\n\n{serving}\n\nProse.\n\n{quality}\n")
    return page


def test_a_figure_changed_by_hand_and_a_record_measured_anew_are_told(page, results, tmp_path):
    assert len(check_tables([page], results)) == 2
    assert write_tables([page], results) == []
    assert check_tables([page], results) == []
    text = page.read_text()
    assert text.startswith("# Title\n\n<!-- table: serving -->\n| policy | ratio |")
    assert "old" not in text.splitlines()
    assert "\n<!-- end table -->\n\nProse.\n\n<!-- table: quality -->\n| policy | " in text
    page.write_text(text.replace("| vanilla | 41.7", "| vanilla | 41.8"))
    (problem,) = check_tables([page], results)
    assert problem.startswith(f"{page}: table quality: differs from its record")
    page.write_text(text)
    pictures = tmp_path / "pictures"
    assert len(check_pictures(results, pictures)) == len(PICTURES)
    assert write_pictures(results, pictures) == [] == check_pictures(results, pictures)
    path = EXPERIMENTS["quality"].path(results)
    record = json.loads(path.read_text())
    record["points"]["oea:k0=3"]["mixed"]["active_experts"] = 31.5
    path.write_text(json.dumps(record))
    _read.cache_clear()
    (problem,) = check_tables([page], results)
    assert "table quality: differs from its record" in problem
    (problem,) = check_pictures(results, pictures)
    assert problem.startswith(f"{pictures / 'loss-by-experts.svg'}: not drawn from its record")


def test_an_experiment_without_a_record_is_named(monkeypatch, tmp_path, results):
    monkeypatch.setattr(history, "has_history", lambda: False)
    EXPERIMENTS["neighbours"].path(results).unlink()
    named, _ = next(history.list_stale(results)).split(": never recorded")
    assert "neighbours" in named.split(", ")
    assert "serving" not in named.split(", ")
