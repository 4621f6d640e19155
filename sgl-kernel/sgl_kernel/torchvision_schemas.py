"""Operator schemas that make it possible to import a CUDA build of torchvision with a CPU build of torch.

For Linux the package index has only CUDA builds of torchvision. Their compiled operators do not load with a CPU build
of torch. The package `torchvision` works without most of these operators. But it registers two of them with torch by
name, so these two must exist. SGLang needs `torchvision` even to serve text, because its image processors import it.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []  # an operator exists as long as the library that defined it


def define_missing() -> None:
    """Define the two operators, without kernels, if torch has no CUDA and torchvision was built for CUDA.

    Otherwise do nothing. A second call also does nothing. A call of such an operator still fails, because it has no
    kernel.
    """
    if _libraries or torch.version.cuda is not None or not _torchvision_is_cuda_build():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)


def _torchvision_is_cuda_build() -> bool:
    """Return whether torchvision's version file names CUDA (`0.28.0+cu130`). An import of torchvision would fail."""
    spec = importlib.util.find_spec("torchvision")
    return (
        spec is not None and spec.origin is not None and "+cu" in Path(spec.origin).with_name("version.py").read_text()
    )
