"""`python -m sglang_xshare`: the command line where the package is on the path but not installed."""

import sys

from .cli import main

sys.exit(main())
