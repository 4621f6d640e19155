"""The demo's way out: whatever stops it, and whenever, it leaves no process behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from common.stand_in import write_stand_in

from benchmark.common.paths import ROOT


@pytest.mark.long  # a busy machine can fail it: eleven processes have to start, and to end within seconds of a signal
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_of_a_round(tmp_path, how):
    path = f"{write_stand_in(tmp_path)}:python"
    command = [sys.executable, "-m", "benchmark.demo"]
    demo = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        family = wait_for_bench(demo)
        # A terminal sends Ctrl-C to the whole foreground group; kill sends its signal to one process.
        os.killpg(demo.pid, how) if how == signal.SIGINT else demo.send_signal(how)
        output, _ = demo.communicate(timeout=30)
        assert demo.returncode == 128 + how, output
        assert "Traceback" not in output
        assert not psutil.wait_procs(family, timeout=10)[1]
    finally:
        demo.kill()  # its servers die with it


def wait_for_bench(demo):
    """Every process of the demo, once its first bench_serving runs against four servers and their workers."""
    began = time.monotonic()
    while time.monotonic() < began + 120:
        assert demo.poll() is None, demo.stdout.read()
        family = psutil.Process(demo.pid).children(recursive=True)
        runs = [process for process in family if "benchmark.common.bench_worker" in process.cmdline()]
        if len(runs) == 2:  # the worker and the run it forked
            assert len(family) == 4 * 2 + 2
            return family
        time.sleep(0.1)
    pytest.fail("the demo reached no round in 120 s")
