"""Run in a process of its own, on one release: parse and resolve server arguments, many times.

Reads a JSON list of argument lists from stdin; prints, for each, a JSON line: what a server would have, or what stops
it and whether that is `Refused`. Resolving needs no GPU.
"""

import json
import sys

from sglang.srt.server_args import prepare_server_args

from sglang_xshare.hooks import Refused
from sglang_xshare.upstream.server import attention_dp_size, resolved


def resolve(arguments: list[str]) -> dict[str, object]:
    """The ranks that divide experts and attention, and the decode capture sizes."""
    try:
        server_args = prepare_server_args(arguments)
        if hasattr(server_args, "resolve_once"):  # from 0.5.20 on, parsing does not resolve
            server_args.resolve_once()
    except (Exception, SystemExit) as error:
        return {"ours": isinstance(error, Refused), "says": str(error)}
    config = resolved(server_args)
    ranks = {"tp": config.tp_size, "ep": config.ep_size, "attention": attention_dp_size(config)}
    return {"ranks": ranks, "sizes": config.cuda_graph_config and config.cuda_graph_config.decode.bs}


if __name__ == "__main__":
    for arguments in json.load(sys.stdin):
        print(json.dumps(resolve(arguments)), flush=True)
