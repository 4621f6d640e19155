"""Run in a process of its own, on one release: resolve server arguments as if on a B200, many times.

Reads a JSON list of argument lists from stdin; prints, for each, a JSON line: what was resolved, the lines that the
stage logged, and what stopped the server, if anything did.
"""

import json
import logging
import sys
from contextlib import ExitStack, contextmanager

import sglang.srt.layers.quantization  # noqa: F401 - imports kernels of the machine that it finds
import torch
from sglang.srt import runtime_context
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import common

from sglang_xshare.check.pretend import _replaced, pretend
from sglang_xshare.gpus import GPUS
from sglang_xshare.upstream.server import resolved, spell

DRAWN = ("random_seed", "nccl_port", "model_config")
"""What SGLang draws or makes anew for each server."""


@contextmanager
def pretend_b200():
    """Within it SGLang takes this machine for a B200, also a release that has no word for that."""
    with ExitStack() as stack:
        if hasattr(runtime_context, "override_platform"):
            stack.enter_context(pretend(GPUS["b200"]))
        else:
            answers = {"is_sm100_supported": True, "is_blackwell_supported": True, "is_cuda": True, "is_cpu": False}
            answers |= {"is_triton_kernels_available": True, "get_device_memory_capacity": 180e9 / 2**20}
            for name, answer in answers.items():
                stack.enter_context(_replaced(common, name, lambda *asked, answer=answer: answer))
            stack.enter_context(_replaced(torch.cuda, "get_device_capability", lambda device=None: (10, 0)))
        yield


def attempt(arguments: list[str]) -> dict[str, object]:
    """How a server with these arguments would be resolved."""
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang_xshare").addHandler(listener)
    stops = None
    try:
        with pretend_b200():
            record = prepare_server_args(arguments)
            if hasattr(record, "resolve_once"):  # from 0.5.20 on, parsing does not resolve
                record.resolve_once()
            config = resolved(record)
            names = set(getattr(record, "__struct_fields__", None) or vars(record)) - set(DRAWN)
            found = {name: spell(getattr(config, name)) for name in names if not name.startswith("_")}
    except (Exception, SystemExit) as error:
        found, stops = {}, f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("sglang_xshare").removeHandler(listener)
    return {"resolved": found, "lines": lines, "stops": stops}


if __name__ == "__main__":
    for arguments in json.load(sys.stdin):
        print(json.dumps(attempt(arguments)), flush=True)
