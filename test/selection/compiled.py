"""Tests of the compiled CPU call: skipped without a compiler, but not where a compiler fails."""

import os

import pytest

from sglang_xshare.selection.cpu_call import library


def _is_expected() -> bool:
    try:
        library._find_compiler()
    except OSError:
        return False
    return os.environ.get(library.SWITCH) != "0"


NEEDS_COMPILER = pytest.mark.skipif(not _is_expected(), reason="no C++ compiler here, or SGLANG_XSHARE_CPU_KERNEL=0")
