"""Run in a process of its own, on one release: which batch sizes a GPU server would capture decode graphs for.

Reads a JSON list of argument lists from stdin; prints, for each, a JSON line with its sizes. Resolving needs no GPU.
"""

import json
import sys

from sglang.srt.server_args import prepare_server_args


def read_sizes(arguments: list[str]) -> list[int]:
    """The decode capture sizes that argument resolution comes to."""
    server_args = prepare_server_args(arguments)
    if not hasattr(server_args, "resolve_once"):  # from 0.5.20 on, parsing does not resolve
        return server_args.cuda_graph_config.decode.bs
    from sglang.srt.arg_groups.overrides import resolving_view

    server_args.resolve_once()
    return resolving_view(server_args).cuda_graph_config.decode.bs


if __name__ == "__main__":
    for arguments in json.load(sys.stdin):
        print(json.dumps({"sizes": read_sizes(arguments)}), flush=True)
