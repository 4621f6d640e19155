"""A small SGLang tree and patch queues: one changes three files and adds one, the later one one and the added."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from sglang_xshare.patching.tree import ABSENT

RELEASE = "0.5.21"
FILES = {
    "sglang/__init__.py": b"",
    "sglang/_version.py": f"__version__ = version = '{RELEASE}'\n__commit_id__ = None\n".encode(),
    "sglang/srt/route.py": b"import torch\n\n\ndef route(x):\n    return x\n\n\ndef other(x):\n    return x\n",
    "sglang/srt/dos.py": b"import os\r\n\r\nSIZE = 1\r\n",
    "sglang/srt/launch.py": "#!/usr/bin/env python\n# café\f\nmain = 1".encode(),
    "sglang/srt/untouched.py": b"import sys\n",
}
MODES = {"sglang/srt/launch.py": 0o755, "sglang/srt/dos.py": 0o640}

HEADER = "Description: what\nReason: why a patch\nUpstream-Status: not proposed\nDrop-When: never\n  at all\n\n"
ROUTE = """\
--- a/sglang/srt/route.py
+++ b/sglang/srt/route.py
@@ -1,1 +1,2 @@
 import torch
+import ours
@@ -4,2 +5,3 @@
 def route(x):
+    x = ours.route(x)
     return x
"""
LAUNCH = """\
diff --git a/sglang/srt/launch.py b/sglang/srt/launch.py
index 000..111 100755
--- a/sglang/srt/launch.py
+++ b/sglang/srt/launch.py
@@ -3 +3,2 @@
-main = 1
\\ No newline at end of file
+main = 2
+café = 3
\\ No newline at end of file
"""
DOS = """\
--- a/sglang/srt/dos.py
+++ b/sglang/srt/dos.py
@@ -3 +3 @@
-SIZE = 1\r
+SIZE = 2\r
"""
ROUTE_AGAIN = """\
--- a/sglang/srt/route.py
+++ b/sglang/srt/route.py
@@ -5 +5,2 @@
     x = ours.route(x)
+    x = ours.check(x)
"""
NEW = """\
--- /dev/null
+++ b/sglang/srt/ours.py
@@ -0,0 +1,2 @@
+def route(x):
+    return x
"""
QUEUE = {"shared/route.patch": ROUTE, f"{RELEASE}/rest.patch": LAUNCH + DOS, "shared/new.patch": NEW}
LATER_QUEUE = {  # another version: two files fewer
    "shared/new.patch": NEW.replace("    return x", "    return None"),
    "shared/route.patch": ROUTE,
    "shared/again.patch": ROUTE_AGAIN,
}

PATCHED = {
    **FILES,
    "sglang/srt/route.py": (
        b"import torch\nimport ours\n\n\n"
        b"def route(x):\n    x = ours.route(x)\n    return x\n\n\n"
        b"def other(x):\n    return x\n"
    ),
    "sglang/srt/dos.py": b"import os\r\n\r\nSIZE = 2\r\n",
    "sglang/srt/launch.py": "#!/usr/bin/env python\n# café\f\nmain = 2\ncafé = 3".encode(),
    "sglang/srt/ours.py": b"def route(x):\n    return x\n",
}
LATER_PATCHED = {
    **FILES,
    "sglang/srt/route.py": PATCHED["sglang/srt/route.py"].replace(
        b"ours.route(x)\n", b"ours.route(x)\n    x = ours.check(x)\n"
    ),
    "sglang/srt/ours.py": b"def route(x):\n    return None\n",
}


def write_tree(root: Path, files: Mapping[str, bytes] = FILES) -> Path:
    """Write the files with their modes; returns `root`."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
        (root / path).chmod(MODES.get(path, 0o644))
    return root


def write_queue(root: Path, patches: Mapping[str, str] = QUEUE, release: str = RELEASE, header: str = HEADER) -> Path:
    """Write patches, series and hashes of the files they name; returns `root`."""
    known = {path: sha256(content).hexdigest() for path, content in FILES.items()} | {"sglang/srt/ours.py": ABSENT}
    touched = [path for path in known if any(f"+++ b/{path}\n" in diff for diff in patches.values())]
    contents = {name: header + diff for name, diff in patches.items()}
    contents[f"{release}/series"] = "# in order\n" + "".join(f"{name}\n" for name in patches)
    contents[f"{release}/hashes"] = "".join(f"{known[path]}  {path}\n" for path in touched)
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode())
    return root
