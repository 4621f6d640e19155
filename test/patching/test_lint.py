"""The lint finds each kind of mistake in a queue, and says what it looked at."""

from pathlib import Path

import pytest

from patching.fake import DOS, FILES, HEADER, LAUNCH, QUEUE, RELEASE, ROUTE, write_queue, write_tree
from scripts.patch_lint import Report, lint
from scripts.pin_release import pin_release

OTHER = "0.5.22"
ROUTED = "sglang/srt/route.py"


@pytest.fixture
def releases(tmp_path):
    """Sources of two releases; in the second the file that all patches share has grown a line."""
    files = {path: content.replace(RELEASE.encode(), OTHER.encode()) for path, content in FILES.items()}
    write_tree(tmp_path / "releases" / RELEASE)
    write_tree(tmp_path / "releases" / OTHER, files | {ROUTED: b"import jax\n" + files[ROUTED]})
    return tmp_path / "releases"


def _pin(queue: Path, releases: Path, series: str) -> int:
    (queue / OTHER).mkdir()
    (queue / OTHER / "series").write_text(series)
    return pin_release(OTHER, queue, releases)


def _lint(queue: Path, releases: Path) -> Report:
    report = lint(queue, releases)
    assert all("\n" not in line for line in [*report.errors, *report.warnings, report.summary])
    return report


def test_a_good_queue(queue, releases):
    report = _lint(queue, releases)
    assert (report.errors, report.warnings) == ([], [])
    assert report.summary == f"3 patches looked at; each hunk matches one place in {RELEASE} (5 hunks)"


def test_one_patch_serves_two_releases_that_pin_release_pinned(queue, releases):
    assert _pin(queue, releases, "shared/route.patch\nshared/new.patch\n") == 2
    report = _lint(queue, releases)
    assert report.errors == []
    assert report.summary.endswith(f"one place in {RELEASE} (5 hunks), {OTHER} (3 hunks)")


def test_an_empty_folder_is_an_error(tmp_path):
    assert _lint(tmp_path, tmp_path).errors == [f"{tmp_path}: no patch found"]


def test_a_patch_in_no_series(queue, releases):
    (queue / "shared/orphan.patch").write_text(HEADER + ROUTE)
    assert _lint(queue, releases).errors == ["shared/orphan.patch: in no series that could be read"]


@pytest.mark.parametrize("field", ["Description", "Reason", "Upstream-Status", "Drop-When"])
def test_each_header_field_is_needed(tmp_path, releases, field):
    for text in (HEADER.replace(f"{field}: ", f"X-{field}: "), HEADER.replace(f"{field}:", f"{field}:\nX:")):
        queue = write_queue(tmp_path / "patches", header=text)
        errors = "\n".join(_lint(queue, releases).errors)
        assert errors.count(f"header field {field} must not be empty") == len(QUEUE)


def test_hashes_agree_with_series_and_sources(queue, releases):
    hashes = queue / RELEASE / "hashes"
    good = hashes.read_text()

    def find_errors(text):
        hashes.write_text(text)
        return "\n".join(_lint(queue, releases).errors)

    unchanged = "sglang/srt/untouched.py is listed but changed by no patch; run `python -m scripts.pin"
    assert unchanged in find_errors(good + f"{'0' * 64}  sglang/srt/untouched.py\n")
    without = "".join(line for line in good.splitlines(keepends=True) if "route" not in line)
    assert "sglang/srt/route.py is changed by the series but not listed" in find_errors(without)
    wrong = find_errors(good.replace(good[:8], "00000000", 1)).splitlines()
    assert any("00000000" in line and "not the file of SGLang" in line for line in wrong)


@pytest.mark.parametrize(
    ("diff", "reason"),
    [
        (ROUTE.replace("-4,2 +5,3 @@\n def route(x):", "-4,1 +5,2 @@"), "hunk 2 matches 2 places (lines 5, 9)"),
        (ROUTE.replace("import torch", "import torch as t"), "hunk 1 matches 0 places"),
        (LAUNCH + DOS + ROUTE.replace("x = ours.route(x)", "x = ours.route(x"), "'(' was never closed"),
    ],
)
def test_a_patch_that_does_not_fit(tmp_path, releases, diff, reason):
    queue = write_queue(tmp_path / "patches", {"shared/p.patch": diff})
    (line,) = _lint(queue, releases).errors
    assert line.startswith(f"SGLang {RELEASE}: ")
    assert reason in line


def test_context_that_no_release_needs_is_a_warning(tmp_path, releases):
    wide = ROUTE.replace("@@ -4,2 +5,3 @@\n", "@@ -3,4 +4,5 @@\n \n").replace("     return x\n", "     return x\n \n")
    queue = write_queue(tmp_path / "patches", {"shared/p.patch": wide})
    report = _lint(queue, releases)
    assert report.errors == []
    where = "shared/p.patch: sglang/srt/route.py: hunk 2"
    assert report.warnings == [f"{where}: more {side} context than needed" for side in ("leading", "trailing")]


def test_context_that_one_release_needs_is_none(tmp_path, releases):
    """Two lines before the change, of which the second release has the nearer one twice."""
    pair = ROUTE.replace("@@ -4,2 +5,3 @@\n", "@@ -3,3 +4,4 @@\n \n")
    queue = write_queue(tmp_path / "patches", {"shared/p.patch": pair})
    (warning,) = _lint(queue, releases).warnings
    assert warning == "shared/p.patch: sglang/srt/route.py: hunk 2: more leading context than needed"
    (releases / OTHER / ROUTED).write_bytes(FILES[ROUTED] + b"\n# again\ndef route(x):\n    return x\n")
    _pin(queue, releases, "shared/p.patch\n")
    report = _lint(queue, releases)
    assert (report.errors, report.warnings, list(report.proved)) == ([], [], [RELEASE, OTHER])
