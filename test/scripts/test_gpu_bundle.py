"""A GPU machine that can install nothing imports all it needs from itself, SGLang's archive and our extras."""

import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from benchmark.common.paths import ROOT
from benchmark.gpu.preflight import CUDA_MODULES, MODULES

LISTS = ("machine", "site", "extras")


def test_server_and_benchmarks_import_offline(tmp_path, pristine_release):
    site = link_packages(read_lists(*LISTS), tmp_path)
    done = import_offline(MODULES, site, pristine_release("0.5.17"))
    assert done.returncode == 0, done.stderr[-2000:]


def test_extras_hold_nothing_that_is_there_already():
    assert not read_lists("extras") & read_lists("machine", "site")


def test_the_archives_hold_deep_gemm_in_the_version_that_the_release_asks_for(pristine_release):
    """No other test sees it: upstream imports it on a GPU only, and it loads only beside torch for CUDA."""
    (metadata,) = pristine_release("0.5.17").glob("sglang-*.dist-info/METADATA")
    asked = re.findall(r"^Requires-Dist: (sgl-deep-gemm==.*)$", metadata.read_text(), re.MULTILINE)
    assert asked == [line for line in read_lines("extras") if line.startswith("sgl-deep-gemm")]
    assert "deep_gemm" in CUDA_MODULES


def read_lists(*names: str) -> set[str]:
    """The distributions in some of the lists, by their normal names."""
    return {_normal(line.partition("==")[0]) for line in read_lines(*names)}


def read_lines(*names: str) -> list[str]:
    """The distributions as they are listed, some with a version."""
    lines = [line for name in names for line in (ROOT / "scripts" / "gpu" / f"{name}.txt").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def link_packages(allowed: set[str], folder: Path) -> Path:
    """A folder with what these distributions installed here, and nothing else."""
    for distribution in distributions():
        if _normal(distribution.name) not in allowed - {"sglang"}:
            continue
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "bin", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    # The archive's own stand-in for IPython; its copy of SGLang goes without soundfile, which the release does not.
    (folder / "IPython").mkdir()
    (folder / "IPython" / "__init__.py").touch()
    (folder / "IPython" / "display.py").write_text("HTML = display = None\n")
    (folder / "soundfile.py").touch()
    return folder


def import_offline(modules: tuple[str, ...] | list[str], site: Path, release: Path) -> subprocess.CompletedProcess[str]:
    """Import the modules, in a Python without any site-packages but this one."""
    path = [release, ROOT / "python", ROOT / "sgl-kernel", ROOT, site]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "SGLANG_USE_CPU_ENGINE": "1"}
    lines = ["from sgl_kernel.torchvision_schemas import define_missing", "define_missing()"]
    script = "\n".join(lines + [f"import {module}" for module in modules])
    return subprocess.run([sys.executable, "-S", "-W", "ignore", "-c", script], env=env, capture_output=True, text=True)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
