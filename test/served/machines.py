"""A second machine, played by a network namespace of this one: the same files, another address."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmark.common.server import Server

ALONE = 'mount -t tmpfs shm /dev/shm && exec "$@"'
"""Shared memory of its own: vLLM's broadcast, which SGLang uses, takes ranks that share it for one machine's."""


@dataclass(frozen=True)
class Machines:
    """This machine and another, on a network of two."""

    namespace: str
    addresses: tuple[str, str]
    """Of this machine and of the other one."""
    link: str
    """The interface by which each reaches the other."""

    def place(self, server: Server, machine: int) -> Server:
        """Have a server that is not started yet run on this machine, 0, or the other one, 1, and use their network."""
        server.env |= {"SGLANG_HOST_IP": self.addresses[machine], "GLOO_SOCKET_IFNAME": self.link}
        if machine == 1:
            server.command = ["ip", "netns", "exec", self.namespace, "sh", "-c", ALONE, "sh", *server.command]
        return server


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Two machines, gone afterwards. Raises PermissionError, and says why, where there may be none."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise PermissionError("network namespaces need root and the program `ip`")
    namespace, link = f"expert{os.getpid()}", f"ex{os.getpid()}"
    here, there = "10.213.77.1", "10.213.77.2"
    made = subprocess.run(["ip", "netns", "add", namespace], capture_output=True, text=True)
    if made.returncode:
        raise PermissionError(f"ip netns add: {made.stderr.strip()}")
    try:
        inside = ("ip", "-n", namespace)
        for command in (
            ("ip", "link", "add", f"{link}h", "type", "veth", "peer", "name", link, "netns", namespace),
            ("ip", "link", "set", f"{link}h", "name", link),
            ("ip", "addr", "add", f"{here}/24", "dev", link),
            ("ip", "link", "set", link, "up"),
            (*inside, "addr", "add", f"{there}/24", "dev", link),
            (*inside, "link", "set", link, "up"),
            (*inside, "link", "set", "lo", "up"),
        ):
            subprocess.run(command, check=True, capture_output=True)
        yield Machines(namespace, (here, there), link)
    finally:
        subprocess.run(["ip", "netns", "del", namespace], check=True)  # and its end of the cable, which takes ours
