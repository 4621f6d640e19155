"""A stand-in for the package torch_memory_saver, which has no CPU build: for a server started with
`--enable-memory-saver`.

What is allocated in one of its regions loses its contents when that region is paused: every byte is 0xFF then, NaN as a
float and -1 as an integer. Whoever resumes it must write it anew, as upstream's users do.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

configure_subprocess = nullcontext


def install(scratch: Path) -> None:
    """Put it where `install_probe` has a process look for modules."""
    folder = scratch / "plugin"
    folder.mkdir(exist_ok=True)
    (folder / "torch_memory_saver.py").write_text(
        "from served.memory_saver import configure_subprocess, torch_memory_saver\n"
    )


class Saver:
    """What its regions allocate, by tag."""

    enabled = True

    def __init__(self) -> None:
        self.storages: dict[str, list[StorageWeakRef]] = defaultdict(list)

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Within it, whatever is allocated belongs to `tag`."""
        with Allocations(self.storages[tag]):
            yield

    def pause(self, tag: str) -> None:
        """Lose what its region holds."""
        for reference in self.storages[tag]:
            if not reference.expired():
                storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                storage.fill_(0xFF)

    def resume(self, tag: str) -> None:
        """There is nothing to bring back."""


class Allocations(TorchDispatchMode):
    """Notes the storage of every tensor that an operation makes; a view of what was there before is none."""

    def __init__(self, storages: list[StorageWeakRef]) -> None:
        super().__init__()
        self.storages = storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run it, and note."""
        kwargs = kwargs or {}
        given = list_storages((args, kwargs))
        out = func(*args, **kwargs)
        self.storages += [reference for reference in list_storages(out) if reference not in given]
        return out


def list_storages(values: Any) -> list[StorageWeakRef]:
    """Of all tensors in there."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


torch_memory_saver = Saver()
