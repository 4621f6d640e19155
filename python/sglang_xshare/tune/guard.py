"""Guards a search's switches of a server's policy: a switch by anybody else ends the search, and is left in force."""

from typing import Any

from ..live import ADDED
from ..live.client import Client, PolicyError
from ..policies.spelling import spell_policy


class SwitchGuard:
    """Switches a server's policy, and compares the number of its switches with that of its own, before and after. What
    it switches to it calls a trial, so that no other one takes it for the policy to put back. `before` is the answer to
    GET /expert_policy at the beginning.

    Raises `PolicyError` as the server does, for a server under trial, and, having changed nothing, where somebody else
    has switched.
    """

    def __init__(self, server: Client) -> None:
        self.server = server
        self.before = server.get_policy()
        if self.before["trial"]:
            allowed = f"to wait for its end; or, if it was killed, sglang-xshare policy set {server.url} POLICY first"
            raise PolicyError(f"{server.url}: its policy is another search's trial; allowed is {allowed}")
        self._switches = int(self.before["switches"])
        self._asking = False

    def get_policy(self) -> dict[str, Any]:
        """What GET /expert_policy answers, where nobody else has switched."""
        answer = self.server.get_policy()
        self._compare(answer)
        return answer

    def set_policy(self, policy: dict[str, Any]) -> None:
        """Switch, unless somebody else has."""
        self._asking = True
        if not self._switch(policy | {"trial": True}, self._switches):
            self._asking = False
            self.get_policy()
        self._asking = False
        self._switches += 1

    def restore(self) -> bool:
        """Switch back to `before`, unless somebody else has switched: whether it did."""
        # A question that was interrupted may have been answered.
        numbers = range(self._switches, self._switches + self._asking + 1)
        return any(self._switch(self.before, number) for number in numbers)

    def _switch(self, policy: dict[str, Any], after: int) -> bool:
        """Have the server switch if this many switches were before: whether it did. Of two at once it takes one."""
        try:
            self.server.set_policy(policy | {"after": after})
        except PolicyError as error:
            if error.status is None or self.server.get_policy()["switches"] == after:
                raise
            return False
        return True

    def __str__(self) -> str:
        """The policy that `restore` puts back, as a command line spells it."""
        keys = {name: value for name, value in self.before.items() if name not in (*ADDED, "policy")}
        return spell_policy(self.before["policy"], keys)

    def _compare(self, answer: dict[str, Any]) -> None:
        if answer["switches"] != self._switches:
            count = f"switch {answer['switches']} in place of {self._switches}"
            raise PolicyError(f"{self.server.url}: somebody else has switched its policy ({count}), which is left so")
