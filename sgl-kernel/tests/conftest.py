"""A rule that skips these tests if a compiled `sgl_kernel` replaces ours. pytest's header then mentions it."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "sglang-xshare-cpu-kernel"

try:
    version(DISTRIBUTION)
    left_out = False
except PackageNotFoundError:
    left_out = True

collect_ignore_glob = ["test_*.py"] if left_out else []


def pytest_report_header() -> str | None:
    return f"sgl-kernel/tests: left out, {DISTRIBUTION} is not installed here" if left_out else None
