"""Let a CUDA build of torchvision be imported on a CPU build of torch.

The package index has only CUDA builds of torchvision for Linux. Their compiled operators do not load on a CPU torch, which
torchvision survives, except that it describes two of them to torch by name (`register_fake`) and so needs them to exist.
SGLang needs torchvision even to serve text: it registers image processors with transformers, which asks for it.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_fragment: torch.library.Library | None = None  # operators live as long as the library that defined them


def define_missing() -> None:
    """Define the operators torchvision names, as schemas without a kernel, where its own build cannot define them.

    That is: torch has no CUDA and the installed torchvision was built for it. Does nothing otherwise, or when called again.
    Calling one of the operators then fails as it does upstream: no kernel for this backend.
    """
    global _fragment
    if _fragment is not None or torch.version.cuda is not None or not _torchvision_is_cuda_build():
        return
    _fragment = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        _fragment.define(schema)


def _torchvision_is_cuda_build() -> bool:
    """Read torchvision's version file (`__version__ = '0.28.0+cu130'`) without importing torchvision."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    return "+cu" in (Path(spec.origin).parent / "version.py").read_text()
