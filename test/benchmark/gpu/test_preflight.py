"""The checks before a run: each fails in one line, and never with a traceback."""

import lzma
import subprocess
import sys

import pytest
from gpu.recorded import write_record

import sglang_xshare
from benchmark.common.paths import ROOT
from benchmark.gpu import compilation, preflight
from benchmark.gpu.preflight import CHECKS, EXPERTS, GRAPH_ROWS, TOP_K, TWO_LAUNCHES, check_all, check_key
from benchmark.gpu.run import TASKS
from benchmark.gpu.shapes import list_trials
from programs import write_program
from sglang_xshare import Batch, Router, build_plan
from sglang_xshare.selection.triton_kernel import tile
from sglang_xshare.selection.triton_kernel.tile import Shape, count_programs, make_tile


def run_module(*names, **env):
    command = [sys.executable, "-W", "ignore", "-m", "benchmark.gpu.preflight", *names]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(preflight, "MODULES", ("json", "no_such_package", "benchmark.gpu.no_such_module"))
    with pytest.raises(RuntimeError, match=r"no_such_package needs no_such_package.*; benchmark"):
        preflight.check_imports()


def test_what_eagle3_imports_on_a_gpu_alone_is_named(monkeypatch):
    """On the CPU nothing imports it: EAGLE-3 passed the other checks, and died when it started."""
    monkeypatch.setattr(preflight, "CUDA_MODULES", preflight.CUDA_MODULES[:1])
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(RuntimeError, match="deep_gemm needs deep_gemm"):
        preflight.CHECKS["eagle3"]()
    (needs,) = [task.needs for task in TASKS if task.experiment == "eagle3"]
    assert "eagle3" in needs


def test_without_any_package_a_check_fails_in_one_line():
    bare = [sys.executable, "-S", "-m", "benchmark.gpu.preflight", "upstream", "selection"]
    done = subprocess.run(bare, cwd=ROOT, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "preflight: upstream: rmsnorm: ModuleNotFoundError: No module named 'torch'",
        "preflight: selection: No module named 'torch'",
    ]


def test_an_unknown_check_is_refused():
    done = run_module("kernels", PYTHONPATH=f"{ROOT / 'python'}")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("preflight: check kernels: ")


def test_nvcc_is_needed_with_cudas_headers(tmp_path, monkeypatch):
    """A wrapper of nvcc in a bin folder is none: nothing links beside it."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(RuntimeError, match="CUDA_HOME=: "):
        preflight.check_nvcc()
    write_program(tmp_path / "bin" / "nvcc", "exit 0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=f"^CUDA_HOME={tmp_path}: "):
        preflight.check_nvcc()


def test_a_kernel_is_compiled_and_linked(tmp_path, monkeypatch):
    write_program(tmp_path / "bin" / "nvcc", 'for one; do last=$one; done; : >"$last"')
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    # Looks for what it is to link to, as a linker does.
    search = 'for place in ${3#-L} $LIBRARY_PATH; do [ -e "$place/lib${one#-l}.so" ] && continue 2; done'
    write_program(tmp_path / "c++", f'for one in "$4" "$5"; do {search}; echo "ld: cannot find $one" >&2; exit 1; done')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path / "lib"))
    for library, folder in (("cudart", "lib64"), ("cuda", "lib")):
        with pytest.raises(RuntimeError, match=f"c[+][+]: ld: cannot find -l{library}$"):
            preflight.check_nvcc()
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"lib{library}.so").touch()
    preflight.check_nvcc()
    write_program(tmp_path / "bin" / "nvcc", "echo 'kernel.cu(2): error: no cuda.h'; exit 2")
    with pytest.raises(RuntimeError, match=r"bin/nvcc: kernel.cu\(2\): error: no cuda.h"):
        preflight.check_nvcc()


def test_a_c_compiler_with_pythons_headers_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(RuntimeError, match="no gcc or clang"):
        preflight.check_cc()
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    # Looks where it is told to, as a compiler does.
    write_program(tmp_path / "gcc", 'for one; do [ -f "${one#-I}/Python.h" ] && exit 0; done; exit 1')
    preflight.check_cc()
    (tmp_path / "Python.h").unlink()
    with pytest.raises(RuntimeError, match=f"gcc finds no Python.h in {tmp_path}"):
        preflight.check_cc()


def test_kernels_that_do_not_compile_are_named_by_experts(monkeypatch):
    """Here every launch fails, as one of a kernel that does not compile."""
    monkeypatch.setattr(compilation, "EXPERTS", (8, 512))
    monkeypatch.setattr(compilation, "WORKERS", 1)
    with pytest.raises(RuntimeError) as error:
        preflight.check_compilation()
    numbers = [reason.partition(": ")[0] for reason in str(error.value).split("; ")]
    forms = ["", " in programs that meet", " in two launches"]
    assert numbers == [f"{experts} experts{form}" for experts in (512, 8) for form in forms]


@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize(("two", "forms"), [("0", ["", " in programs that meet"]), ("1", ["", " in two launches"])])
def test_a_served_number_of_experts_is_compiled_as_tasks_launch_it(monkeypatch, experts, two, forms):
    asked = []
    monkeypatch.setattr(compilation, "check", lambda *args: asked.append(args))
    monkeypatch.setenv("SGLANG_XSHARE_TWO_LAUNCHES", two)
    CHECKS[f"compilation-{experts}"]()
    assert asked == [(experts, form) for form in forms]
    monkeypatch.setattr(compilation, "check", lambda experts, form: f"{experts} experts{form}: no" if form else None)
    with pytest.raises(RuntimeError, match=f"^{experts} experts{forms[1]}: no$"):
        CHECKS[f"compilation-{experts}"]()


def test_our_kernel_is_held_to_the_reference(monkeypatch):
    preflight.check_selection("cpu", "torch")
    original = sglang_xshare.select

    def select(*args, backend):
        found = original(*args, backend=backend)
        if backend != "reference":
            found.topk_ids.masked_fill_(~args[3].valid[:, None], 5)  # padding that routes to an expert
        return found

    monkeypatch.setattr(sglang_xshare, "select", select)
    with pytest.raises(RuntimeError, match="topk_ids of 125 rows in a graph of 128: not the reference's"):
        preflight.check_selection("cpu", "torch")


def test_our_kernel_is_launched_cooperatively(monkeypatch):
    """Whatever shapes the file holds, or a GPU will have written to it."""
    plan, batch = build_plan("xshare", k0=1, add=24), Batch()
    most = max(trial.rows for trial in list_trials() if trial.experts == EXPERTS and trial.tile == trial.rows)

    def programs():
        return count_programs(make_tile(plan, Router(TOP_K), batch, GRAPH_ROWS, EXPERTS), plan, batch, GRAPH_ROWS)

    assert programs() > 1
    monkeypatch.setattr(tile, "SHAPES", [Shape(EXPERTS, {most: 32}, (32, 16))])
    assert programs() > 1


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """What each check would say, in one launch or in two; it counts how often each is asked."""
    said = dict.fromkeys([*CHECKS, "two launches"])
    asked = []

    def run_checks(names, env=None):
        asked.extend(names)
        return {name: said["two launches" if env == TWO_LAUNCHES else name] for name in names}

    monkeypatch.setattr(preflight, "CHECKED", tmp_path / "machine" / "checked")
    monkeypatch.setattr(preflight, "run_checks", run_checks)
    monkeypatch.setattr(preflight, "unpack_published", lambda: False)
    return said, asked


def test_what_failed_is_kept_and_asked_again(tmp_path, answers):
    said, asked = answers
    said["nvcc"] = "no nvcc"
    record = write_record(tmp_path, "run", {})
    for _ in range(2):
        check_all(record)
    assert asked == [*CHECKS, "nvcc"]
    rows = preflight.rows(record.points)
    assert [row.verdict for row in rows] == ["pass", "pass", "miss", *["pass"] * (len(CHECKS) - 3)]
    assert rows[2].measured == "no nvcc"


def test_another_machine_is_checked_anew(tmp_path, answers):
    record = write_record(tmp_path, "run", {})
    check_all(record)
    preflight.CHECKED.unlink()
    check_all(record)
    assert answers[1] == [*CHECKS, *CHECKS]


@pytest.mark.parametrize("name", ["selection", "compilation-32", "compilation-128"])
@pytest.mark.parametrize("by_two", [None, "wrong as well"])
def test_two_launches_are_tried_where_one_fails(tmp_path, answers, by_two, name):
    said, _ = answers
    said |= {name: "a cooperative launch failed", "two launches": by_two}
    record = write_record(tmp_path, "run", {})
    check_all(record)
    point = record.points[check_key(name)]
    assert point["passed"] is (by_two is None)
    assert point.get("env") == (TWO_LAUNCHES if by_two is None else None)
    (row,) = [row for row in preflight.rows(record.points) if row.what.startswith(f"{name}:")]
    assert row.verdict == "miss"
    assert row.measured.endswith("a cooperative launch failed")


def test_published_kernels_are_tried_where_the_archives_fail(tmp_path, answers, monkeypatch):
    said, asked = answers
    said["upstream"] = "no kernel image"
    monkeypatch.setattr(preflight, "unpack_published", lambda: not said.update(upstream=None))
    record = write_record(tmp_path, "run", {})
    check_all(record)
    assert asked == [*CHECKS, "upstream"]
    assert record.points[check_key("upstream")]["passed"] is True


def test_published_kernels_are_unpacked_over_the_archives(tmp_path, monkeypatch):
    packed = tmp_path / "packed.xz"
    monkeypatch.setattr(preflight, "PUBLISHED", packed)  # a bundle may be in this checkout
    assert not preflight.unpack_published()
    package = tmp_path / "sgl_kernel" / "__init__.py"
    (package.parent / "sm90").mkdir(parents=True)
    package.touch()
    packed.write_bytes(lzma.compress(b"kernels"))
    monkeypatch.setattr(preflight, "find_spec", lambda name: type("Spec", (), {"origin": str(package)}))
    assert preflight.unpack_published()
    assert (package.parent / "sm90" / "common_ops.abi3.so").read_bytes() == b"kernels"


def test_a_check_that_crashes_or_hangs_is_no_more_than_a_reason(tmp_path, monkeypatch):
    (tmp_path / "benchmark" / "gpu").mkdir(parents=True)
    (tmp_path / "benchmark" / "gpu" / "preflight.py").write_text(
        "import os, sys, time\n"
        "if sys.argv[1] == 'hangs': time.sleep(60)\n"
        "if sys.argv[1] == 'crashes': os.abort()\n"
        "if sys.argv[1] == 'fails': sys.exit('preflight: fails: so it does')\n"
    )
    monkeypatch.setattr(preflight, "ROOT", tmp_path)
    assert preflight.run_checks(["passes", "fails", "crashes"], timeout=60.0) == {
        "passes": None,
        "fails": "so it does",
        "crashes": "ended with status -6",
    }
    assert preflight.run_checks(["hangs"], timeout=0.5) == {"hangs": "no answer in time"}
