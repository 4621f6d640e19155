"""Schemas that let a CUDA build of torchvision be imported on a CPU build of torch.

The package index has only CUDA builds of torchvision for Linux, whose compiled operators do not load on a CPU torch.
torchvision works without them, except for two operators that it registers with torch by name and that must exist.
SGLang needs torchvision even to serve text, because the image processors that SGLang registers import it.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []  # an operator lives as long as the library that defined it


def define_missing() -> None:
    """Define the two operators, without kernels, if torch has no CUDA and torchvision was built for CUDA.

    Otherwise, and in a second call, do nothing. A call of an operator fails as before, without a kernel.
    """
    if _libraries or torch.version.cuda is not None or not _torchvision_is_cuda_build():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)


def _torchvision_is_cuda_build() -> bool:
    """Return whether torchvision's version file names CUDA (`0.28.0+cu130`); an import of torchvision would fail."""
    spec = importlib.util.find_spec("torchvision")
    return (
        spec is not None and spec.origin is not None and "+cu" in Path(spec.origin).with_name("version.py").read_text()
    )
