"""The runner of long tests, `make test-long`: a part that passed is not run again at the same source, one alone can."""

import subprocess

import pytest

from programs import copy_files, read_line, run_program, write_program

PARTS = ["test/patching/test_kill.py", "test/docs/test_cli.py"]
# Stands for `python -m pytest`: lists two parts and ends with $COLLECT; notes what it runs, and fails the part named in
# $FAIL, or with $MEET one beside which no other runs.
PYTHON = """#!/bin/sh
case "$*" in
*--collect-only*)
    printf '%s\\n' test/patching/test_kill.py::test_x test/patching/test_kill.py::test_y
    printf '%s\\n' test/docs/test_cli.py::test_z "3 tests"
    exit $COLLECT ;;
*) for part; do :; done; echo "$part" >>ran
    [ -z "$MEET" ] || for _ in $(seq 100); do [ $(wc -l <ran) = 2 ] && exit 0; sleep 0.1; done
    [ -z "$MEET" ] && [ "$part" != "$FAIL" ] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A git repository with the script and a stand-in for Python."""
    copy_files(tmp_path, "scripts/test_long.sh")
    write_program(tmp_path / "python", PYTHON)
    (tmp_path / ".gitignore").write_text("build/\nran\n")
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def run_parts(checkout, **env):
    env = {"PART": "", "FAIL": "", "COLLECT": "0", "LANES": "", "MEET": "", **env, "PYTHON": "./python"}
    return run_program(checkout / "scripts" / "test_long.sh", env=env)


def ran(checkout):
    return (checkout / "ran").read_text().split()


def test_runs_every_part_and_resumes_after_a_failure(checkout):
    failed = run_parts(checkout, FAIL="test/docs/test_cli.py")
    assert failed.returncode == 1
    assert "failed: test/docs/test_cli.py" in failed.stderr
    assert run_parts(checkout).returncode == 0
    assert ran(checkout) == [*PARTS, "test/docs/test_cli.py"]


@pytest.mark.parametrize(
    ("name", "again"), [("new.md", ["test/docs/test_cli.py"]), ("new.py", PARTS), ("python", PARTS)]
)
def test_a_changed_document_repeats_only_the_tests_of_documents(checkout, name, again):
    run_parts(checkout)
    with (checkout / name).open("a") as file:
        file.write("# new\n")
    run_parts(checkout)
    assert ran(checkout) == [*PARTS, *again]


def test_the_longest_part_of_the_last_run_begins_and_parts_share_a_folder_of_one_state(checkout):
    run_parts(checkout)
    done = checkout / "build" / "test-long"
    (done / "test_docs_test_cli.py.log").write_text("=== 1 passed in 100.24s (0:01:40) ===\n")
    (checkout / "python").write_text(PYTHON + "# changed\n")
    (before,) = done.glob("served-*")
    run_parts(checkout)
    assert ran(checkout) == [*PARTS, *PARTS[::-1]]
    (after,) = done.glob("served-*")
    assert after != before


def test_one_part_alone(checkout):
    """`make test-long PART=patching/test_kill`."""
    assert "(got 'nothing')" in read_line(run_parts(checkout, PART="nothing"))
    assert run_parts(checkout, PART="patching/test_kill").returncode == 0
    assert ran(checkout) == ["test/patching/test_kill.py"]


def test_two_parts_at_once(checkout):
    assert run_parts(checkout, LANES="2", MEET="1").returncode == 0
    assert sorted(ran(checkout)) == sorted(PARTS)
    assert read_line(run_parts(checkout, LANES="0")) == "test-long: LANES must be a number from 1 up (got 0)"


def test_tests_that_cannot_be_collected_are_told_and_none_is_run(checkout):
    failed = run_parts(checkout, COLLECT="2")
    assert failed.returncode == 1
    assert failed.stderr.endswith("3 tests\ntest-long: pytest could not collect the tests: status 2\n")
    assert not (checkout / "ran").exists()
    assert run_parts(checkout, COLLECT="5", PART="nothing").returncode == 1
