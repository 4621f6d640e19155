"""Run in a process of its own, on one release: parse and resolve server arguments, many times.

Reads a JSON list of argument lists from stdin; prints, for each, a JSON line: null where the server would start, else
what stops it and whether that is `Refused`.
"""

import json
import sys

from sglang.srt.server_args import prepare_server_args

from sglang_xshare.hooks import Refused


def attempt(arguments: list[str]) -> dict[str, object] | None:
    """What stops a server with these arguments."""
    try:
        server_args = prepare_server_args(arguments)
        if hasattr(server_args, "resolve_once"):  # from 0.5.20 on, parsing does not resolve
            server_args.resolve_once()
    except (Exception, SystemExit) as error:
        return {"ours": isinstance(error, Refused), "says": str(error)}
    return None


if __name__ == "__main__":
    for arguments in json.load(sys.stdin):
        print(json.dumps(attempt(arguments)), flush=True)
