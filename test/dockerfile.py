"""What the Dockerfile copies: the one list of what the package is built from."""

import re
from fnmatch import fnmatch

from benchmark.common.paths import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def list_copied() -> list[str]:
    """Return what the Dockerfile copies of the checkout. Raises AssertionError if Docker would ignore some of it."""
    copied = re.findall(r"^COPY (\S+) (\S+)$", DOCKERFILE, re.MULTILINE)
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert ignored[0] == "*"
    for source, target in copied:
        assert f"!{source}" in ignored
        assert not any(fnmatch(source, pattern) for pattern in ignored[1:])
        assert target == f"/opt/sglang-xshare/{source}", "links between the copies must hold there too"
    return [source for source, _ in copied]
