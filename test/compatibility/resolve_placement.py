"""Run in a process of its own, on one release: what SGLang makes of `--expert-placement`.

Reads a JSON list of argument lists from stdin; prints, for each, a JSON line: the ranks that divide experts and
attention, or the line that refuses the server, and whether that is ours.
"""

import json
import sys

from sglang.srt.server_args import prepare_server_args

from sglang_xshare.hooks import Refused
from sglang_xshare.upstream.server import attention_dp_size, resolved


def read_placement(arguments: list[str]) -> dict[str, object]:
    """What argument resolution comes to."""
    try:
        server_args = prepare_server_args(arguments)
        if hasattr(server_args, "resolve_once"):  # from 0.5.20 on, parsing does not resolve
            server_args.resolve_once()
    except (Exception, SystemExit) as error:
        return {"ours": isinstance(error, Refused), "says": str(error)}
    config = resolved(server_args)
    return {"tp": config.tp_size, "ep": config.ep_size, "attention": attention_dp_size(config)}


if __name__ == "__main__":
    for arguments in json.load(sys.stdin):
        print(json.dumps(read_placement(arguments)), flush=True)
