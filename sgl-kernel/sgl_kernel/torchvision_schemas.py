"""Let a CUDA build of torchvision be imported on a CPU build of torch.

The package index has only CUDA builds of torchvision for Linux. Their compiled operators do not load on a CPU torch.
torchvision survives that, but for two operators which it describes to torch by name and which must therefore exist.
SGLang needs torchvision even to serve text: it registers image processors with transformers, which asks for it.
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
    """Define the two operators, without kernels, where torch has no CUDA and torchvision was built for it.

    Does nothing elsewhere, or when called again. Calling an operator fails as it would without us: no kernel.
    """
    if _libraries or torch.version.cuda is not None or not _torchvision_is_cuda_build():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)


def _torchvision_is_cuda_build() -> bool:
    """Whether torchvision's version file says so (`__version__ = '0.28.0+cu130'`); importing torchvision would fail."""
    spec = importlib.util.find_spec("torchvision")
    return (
        spec is not None and spec.origin is not None and "+cu" in Path(spec.origin).with_name("version.py").read_text()
    )
