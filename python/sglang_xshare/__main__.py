"""The command `sglang-xshare`, also as `python -m sglang_xshare`."""

import signal
import sys


def main() -> int:
    """Import the command line and run it. Returns its exit code, 130 after Ctrl-C during the import."""
    try:
        from .cli import main as run

        return run()
    except KeyboardInterrupt:
        print("sglang-xshare: interrupted; nothing changed", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
