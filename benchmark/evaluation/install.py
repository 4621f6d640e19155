"""Install the harness without changing installed packages: `python -m benchmark.evaluation.install`."""

import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements.txt"


def is_installed() -> bool:
    """Return whether the harness is installed in the pinned version."""
    pins = [line.split("==") for line in REQUIREMENTS.read_text().splitlines() if "==" in line]
    try:
        return all(version(name.partition("[")[0]) == pin for name, pin in pins)
    except PackageNotFoundError:
        return False


def install() -> None:
    """Install the harness if it is missing. Raises RuntimeError with the end of pip's output."""
    if is_installed():
        return
    print(f"installing {REQUIREMENTS.name} of lm-evaluation-harness", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    freeze = subprocess.run([*pip, "freeze", "--exclude-editable"], capture_output=True, text=True, check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        # pip accepts no constraint with a path or an address.
        constraints.writelines(f"{line}\n" for line in freeze.stdout.splitlines() if "==" in line and "@" not in line)
        constraints.flush()
        arguments = ["install", "--quiet", "--constraint", constraints.name, "--requirement", str(REQUIREMENTS)]
        done = subprocess.run([*pip, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError("pip failed:\n" + "\n".join(done.stdout.splitlines()[-10:]))


if __name__ == "__main__":
    try:
        install()
    except RuntimeError as error:
        sys.exit(f"evaluation: {error}")
