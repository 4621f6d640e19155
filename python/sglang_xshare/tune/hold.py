"""A server's policy in one hand: whoever else switches it meanwhile is noticed, and has the last word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..live.client import PolicyError

if TYPE_CHECKING:
    from .server import Server


class Switched(PolicyError):
    """Somebody else has switched the policy."""


class Hold:
    """Switches a server's policy, and compares the number of its switches with that of its own, before and after.
    `before` is the answer to GET /expert_policy at the beginning.

    Raises `Switched`, having changed nothing, and `PolicyError` as the server does.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.before = server.get_policy()
        self._switches = int(self.before["switches"])
        self._asking = False

    def get_policy(self) -> dict[str, Any]:
        """What GET /expert_policy answers, where nobody else has switched."""
        answer = self.server.get_policy()
        self._compare(answer)
        return answer

    def set_policy(self, policy: dict[str, Any]) -> None:
        """Switch, unless somebody else has."""
        self.get_policy()
        self._asking = True
        answer = self.server.set_policy(policy)
        self._asking = False
        self._switches += 1
        self._compare(answer)

    def restore(self) -> None:
        """Switch back to `before`, unless somebody else has switched."""
        switches = self.server.get_policy()["switches"]
        # A question that was interrupted may have been answered.
        if switches in (self._switches, self._switches + self._asking):
            self.server.set_policy(self.before)

    def _compare(self, answer: dict[str, Any]) -> None:
        if answer["switches"] != self._switches:
            count = f"switch {answer['switches']} in place of {self._switches}"
            raise Switched(f"{self.server.url}: somebody else has switched its policy ({count}), which is left so")
