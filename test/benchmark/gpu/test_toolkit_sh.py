"""Where servers find CUDA when they compile kernels: its folder, and a libcuda.so to link to."""

import os
import subprocess

import pytest

from benchmark.common.paths import ROOT
from programs import write_program

SCRIPT = ROOT / "scripts" / "gpu" / "toolkit.sh"


@pytest.fixture
def machine(tmp_path):
    """nvcc is a wrapper in a bin folder; `home` holds CUDA, and the driver brings libcuda.so.1 alone."""
    write_program(tmp_path / "bin" / "nvcc", "exit 0")
    write_program(tmp_path / "bin" / "python3", "exit 1")  # torch brings no CUDA
    write_program(tmp_path / "home" / "bin" / "nvcc", "exit 0")
    (tmp_path / "home" / "include").mkdir()
    (tmp_path / "home" / "include" / "cuda_runtime.h").touch()
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "libcuda.so.1").touch()
    return tmp_path


def find(machine, *homes, **env):
    """(CUDA_HOME, LIBRARY_PATH) after looking in these folders, below the machine's."""
    command = f'set -euo pipefail; . {SCRIPT}; find_toolkit "$@"; echo "${{CUDA_HOME:-}}|${{LIBRARY_PATH:-}}"'
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "LIBRARY_PATH")}
    paths = {"PATH": f"{machine / 'bin'}:/usr/bin:/bin", "LD_LIBRARY_PATH": str(machine / "driver")}
    arguments = [str(machine / "scratch"), *(str(machine / home) for home in homes)]
    done = subprocess.run(
        ["bash", "-c", command, "-", *arguments], env=kept | paths | env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip().replace(f"{machine}/", "").split("|")


def test_only_a_folder_with_cudas_headers_is_taken(machine):
    assert find(machine, "nowhere", "home")[0] == "home"
    assert find(machine, "nowhere", CUDA_HOME=str(machine / "home"))[0] == "home"
    assert find(machine, "home", CUDA_HOME=str(machine))[0] == "home"
    assert find(machine, "nowhere", CUDA_HOME=str(machine))[0] == ""


def test_the_headers_of_torchs_wheels_do_beside_an_nvcc(machine):
    torchs = machine / "site" / "nvidia" / "cu13"
    (torchs / "include").mkdir(parents=True)
    (torchs / "include" / "cuda_runtime.h").touch()
    (torchs / "lib").mkdir()
    (torchs / "lib" / "libcudart.so.13").touch()
    write_program(machine / "bin" / "python3", f"echo {torchs}")
    write_program(machine / "bin" / "nvcc", "echo $0 $1")
    assert find(machine, "nowhere")[0] == "scratch/cuda"
    made = machine / "scratch" / "cuda"
    assert (made / "include" / "cuda_runtime.h").exists()
    assert (made / "lib64" / "libcudart.so").resolve() == torchs / "lib" / "libcudart.so.13"
    said = subprocess.run([made / "bin" / "nvcc", "-V"], capture_output=True, text=True).stdout
    assert said == f"{machine / 'bin' / 'nvcc'} -V\n"
    assert find(machine, "home")[0] == "home"


def test_a_library_to_link_to_is_made_of_the_drivers(machine):
    for _ in range(2):
        assert find(machine, "home")[1] == "scratch/lib"
    assert (machine / "scratch" / "lib" / "libcuda.so").resolve() == machine / "driver" / "libcuda.so.1"
    assert find(machine, "home", LIBRARY_PATH="/more")[1] == "scratch/lib:/more"
    (machine / "driver" / "libcuda.so.1").rename(machine / "driver" / "libcuda.so")
    find(machine, "home")
    assert (machine / "scratch" / "lib" / "libcuda.so").resolve() == machine / "driver" / "libcuda.so"
