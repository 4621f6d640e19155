"""Run in a process of its own, on one release: parse and resolve server arguments, many times.

Reads a JSON list, (whether this machine is taken for a B200, lists of arguments), from stdin; prints, for each list of
arguments, a JSON line: the lines that the stage logged, and what a server would have, or what stops it and whether that
is `Refused`. Resolving needs no GPU.
"""

import json
import logging
import sys
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from sglang.srt import runtime_context
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import common

from sglang_xshare.check.pretend import _replaced, pretend
from sglang_xshare.gpus import GPUS
from sglang_xshare.hooks import Refused
from sglang_xshare.upstream.server import attention_dp_size, resolved, spell

DRAWN = ("random_seed", "nccl_port", "model_config")
"""Fields that differ between two servers with the same flags, because SGLang draws or makes them anew."""


@contextmanager
def pretend_b200():
    """Within it SGLang takes this machine for a B200, also a release that has no word for that."""
    import sglang.srt.layers.quantization  # noqa: F401 - imports kernels of the machine that it finds

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


def resolve(arguments: list[str], lines: list[str]) -> dict[str, object]:
    """All that is resolved, the ranks that divide experts and attention, and the decode capture sizes."""
    try:
        record = prepare_server_args(arguments)
        if hasattr(record, "resolve_once"):  # from 0.5.20 on, parsing does not resolve
            record.resolve_once()
        config = resolved(record)
        names = set(getattr(record, "__struct_fields__", None) or vars(record)) - set(DRAWN)
        found = {name: spell(getattr(config, name)) for name in names if not name.startswith("_")}
    except (Exception, SystemExit) as error:
        return {"ours": isinstance(error, Refused), "says": str(error), "lines": lines}
    ranks = {"tp": config.tp_size, "ep": config.ep_size, "attention": attention_dp_size(config)}
    sizes = config.cuda_graph_config and config.cuda_graph_config.decode.bs
    return {"resolved": found, "ranks": ranks, "sizes": sizes, "lines": lines}


if __name__ == "__main__":
    is_b200, asked = json.load(sys.stdin)
    listener = logging.Handler()
    logging.getLogger("sglang_xshare").addHandler(listener)
    for arguments in asked:
        lines: list[str] = []
        listener.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore[method-assign,misc]
        with pretend_b200() if is_b200 else nullcontext():
            print(json.dumps(resolve(arguments, lines)), flush=True)
