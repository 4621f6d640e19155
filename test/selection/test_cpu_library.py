"""The compiled call's library: where it is built and found again, what happens where it cannot be, what it touches."""

import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmark.common.paths import ROOT
from selection.cases import fill_logits, spell
from selection.compiled import NEEDS_COMPILER
from sglang_xshare import Router, select
from sglang_xshare.selection.cpu_call import library

XSHARE = spell("xshare:k0=1,add=2")
FLAGS = ("-std=c++17", "-O0", "-fPIC", "-shared")
"""Which take a third of the time."""
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g")
BUILD = f"""
from sglang_xshare.selection.cpu_call import library
print(library.build({FLAGS}))
"""
UNDER_SANITIZERS = f"""
import sys
import pytest
from sglang_xshare.selection.cpu_call import library
library.FLAGS += {SANITIZED}
assert b"__asan_report" in library.build(library.FLAGS).read_bytes()
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "test/selection/test_cpu_call.py",
    "test/selection/test_backends.py", "-k", "not triton"]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A library that was built with `FLAGS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("built")))
        return library.build(FLAGS)


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """As a process that has not asked for the library yet, and an empty cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def read_line(caplog, selections=1):
    """The one line that is logged of so many selections."""
    with caplog.at_level(logging.WARNING):
        for _ in range(selections):
            assert select(torch.zeros(4, 8), XSHARE, Router(2)).topk_ids.shape == (4, 2)
    (line,) = caplog.messages
    return line


@NEEDS_COMPILER
def test_built_once_for_a_source_and_flags(built, anew, monkeypatch):
    """The same are found again, without a compiler's run; another compiler makes another library."""
    first = Path(shutil.copytree(built.parent, anew / "sglang_xshare"), built.name)
    written = first.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert library.build(FLAGS) == first
    assert first.stat().st_mtime_ns == written
    monkeypatch.setenv("CXX", "g++ -Dselect_experts=other")
    assert library.build(FLAGS) != first
    assert len(list(first.parent.iterdir())) == 2
    monkeypatch.delenv("CXX")
    (anew / "csrc").mkdir()
    (anew / "csrc" / "nothing.cpp").write_text("int nothing;\n")
    monkeypatch.setattr(library, "SOURCE", anew / "csrc")
    assert len({first, library.build(FLAGS), library.build((*FLAGS, "-g"))}) == 3, "by its content, and by the flags"


@NEEDS_COMPILER
def test_processes_may_build_at_once(anew):
    """As ranks of a server do at their first start."""
    run = [sys.executable, "-c", BUILD]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: subprocess.run(run, capture_output=True, text=True, check=True), range(2)))
    assert len({one.stdout for one in done}) == 1
    assert len(list((anew / "sglang_xshare").iterdir())) == 1


def test_without_a_compiler_torch_selects_and_the_log_says_so(anew, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(anew))
    monkeypatch.delenv("CXX", raising=False)
    line = read_line(caplog, 3)
    assert line.startswith("Experts are selected in torch on this CPU, which takes longer: no C++ compiler")
    with pytest.raises(ValueError, match="backend = 'cpu': must be torch, because this machine has no compiled call"):
        select(torch.zeros(4, 8), XSHARE, Router(2), backend="cpu")


def test_a_compiler_that_fails_is_quoted_in_one_line(anew, monkeypatch, caplog):
    compiler = anew / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho "plan.h: fatal error: no disk" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert read_line(caplog).endswith("broken: plan.h: fatal error: no disk")
    assert list((anew / "sglang_xshare").iterdir()) == []


@NEEDS_COMPILER
@pytest.mark.parametrize("harm", ["cut", "zeroed", "emptied", "another"])
def test_a_damaged_library_is_built_anew(built, anew, monkeypatch, harm):
    """One cut short would end every process that loads it by a signal."""
    path, whole = anew / "sglang_xshare" / built.name, built.read_bytes()
    path.parent.mkdir()
    zeroed = whole[:4096] + bytes(len(whole) - 4096)
    path.write_bytes({"cut": whole[:5000], "zeroed": zeroed, "emptied": b"", "another": b"\1" * 99}[harm])
    assert library.build(FLAGS) == path
    assert len(path.read_bytes()) == len(whole)
    monkeypatch.setattr(library, "FLAGS", FLAGS)
    assert library.load() is not None


@NEEDS_COMPILER
def test_a_library_without_our_functions_leaves_it_to_torch(anew, monkeypatch, caplog, tmp_path_factory):
    source = tmp_path_factory.mktemp("csrc")
    (source / "nothing.cpp").write_text("int nothing;\n")
    monkeypatch.setattr(library, "SOURCE", source)
    assert "undefined symbol" in read_line(caplog)


@pytest.mark.parametrize("compiler", ["no-such-compiler -O1", "g++ '-O2", "true", "g++ -fsyntax-only", "a\nb"])
def test_whatever_a_compiler_is_called_it_costs_a_line_at_most(anew, monkeypatch, caplog, compiler):
    monkeypatch.setenv("CXX", compiler)
    line = read_line(caplog, 2)
    assert "\n" not in line
    assert "CXX is 'no-such-compiler', which is not on the path" in line or not compiler.startswith("no-such")


@NEEDS_COMPILER
def test_fast_arithmetic_is_not_taken_over(anew, monkeypatch):
    """Whose bits are not torch's, and which has no NaN."""
    monkeypatch.setenv("CXX", "g++ -ffast-math")
    plan = spell("xshare:k0=1,add=5,own_share=0.7351")  # for which no other test has prepared a call
    for kind in ("normal", "special", "dead rows"):
        found, same = (select(fill_logits(kind, 9, 32, 0), plan, Router(4), backend=one) for one in ("cpu", "torch"))
        assert torch.equal(found.topk_ids, same.topk_ids)
        assert torch.equal(found.topk_weights, same.topk_weights)


@NEEDS_COMPILER
def test_a_write_that_fails_leaves_nothing(anew, monkeypatch):
    def fail(*paths):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        library.build(FLAGS)
    assert list((anew / "sglang_xshare").iterdir()) == []


@pytest.mark.parametrize("cache", ["no home", "a file"])
def test_a_cache_that_cannot_be_written_leaves_it_to_torch(anew, monkeypatch, caplog, cache):
    blocked = anew / "file"
    blocked.write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(blocked))
    if cache == "no home":
        for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert ("set TORCH_EXTENSIONS_DIR to a folder" in read_line(caplog)) == (cache == "no home")


def test_the_environment_leaves_it_to_torch(anew, monkeypatch, caplog):
    monkeypatch.setenv(library.SWITCH, "0")
    with caplog.at_level(logging.WARNING):
        assert library.load() is None
        select(torch.zeros(4, 8), XSHARE, Router(2))
    assert caplog.messages == []
    assert list(anew.iterdir()) == []


@pytest.mark.long
@NEEDS_COMPILER
def test_under_sanitizers(tmp_path):
    """Every case of the compiled call with a library that ends at an access out of bounds or undefined behaviour."""
    # The latter, as the former looks for what throws exceptions before torch has loaded it.
    names = ["-print-file-name=libasan.so", "-print-file-name=libstdc++.so"]
    found = [subprocess.run(["g++", name], capture_output=True, text=True, check=True) for name in names]
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    environment["LD_PRELOAD"] = " ".join(one.stdout.strip() for one in found)
    run = [sys.executable, "-c", UNDER_SANITIZERS]
    done = subprocess.run(run, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
