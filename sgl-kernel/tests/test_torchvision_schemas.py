"""Tests that torchvision can be imported with a CPU build of torch, and that nothing changes for other builds."""

import subprocess
import sys
from pathlib import Path

import pytest

from sgl_kernel import torchvision_schemas


def test_torchvision_and_its_image_io_can_be_imported() -> None:
    code = "import torchvision; from torchvision.io import decode_jpeg; print(torchvision.__version__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("version", "cuda_build"), [("0.28.0+cu130", True), ("0.28.0+cpu", False), ("0.28.0", False)])
def test_build_is_read_from_the_version_file(
    version: str, cuda_build: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "version.py").write_text(f"__version__ = '{version}'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    assert torchvision_schemas._torchvision_is_cuda_build() is cuda_build
