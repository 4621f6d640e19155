"""`python -m sglang_xshare` is the command `sglang-xshare`."""

import sys

from .cli import main

sys.exit(main())
