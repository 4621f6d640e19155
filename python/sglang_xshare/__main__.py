"""The entry point of `sglang-xshare` and `python -m sglang_xshare`."""

import signal
import sys


def main() -> int:
    """Run the command line and return its exit code. The code is 130 after Ctrl-C during the import."""
    try:
        from .cli import main as run

        return run()
    except KeyboardInterrupt:
        print("sglang-xshare: interrupted; nothing changed", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
