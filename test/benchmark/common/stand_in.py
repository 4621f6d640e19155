"""A release tree that stands in for SGLang: starts in a moment, so that starting and stopping can be tested often.

Its server has a worker that dies with it, as upstream's do, and leaves a temporary file behind; BEHAVE=exit or hang in
the environment makes it end early or never answer. Its benchmark never ends.
"""

from pathlib import Path

LAUNCH_SERVER = """
import ctypes, os, signal, subprocess, sys, tempfile, time
from http.server import BaseHTTPRequestHandler, HTTPServer

print("arguments", *sys.argv[1:], flush=True)
if os.environ.get("BEHAVE") == "exit":
    sys.exit("out of experts")
open(os.path.join(tempfile.gettempdir(), "left"), "w").close()
subprocess.Popen(["sleep", "600"], preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))
if os.environ.get("BEHAVE") == "hang":
    time.sleep(600)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in ("/health", "/metrics") else 404)
        self.end_headers()
        self.wfile.write(b"# text")

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET() if self.path != "/generate" else (self.send_response(200), self.end_headers())

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
BENCHMARK = """
import time

def main():
    time.sleep(600)

if __name__ == "__main__":
    main()
"""


def write_stand_in(folder: Path) -> Path:
    """Write the tree into `folder`, to be put first on a server's path."""
    package = folder / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(LAUNCH_SERVER)
    (package / "benchmark").mkdir()
    (package / "benchmark" / "serving.py").write_text(BENCHMARK)
    return folder
