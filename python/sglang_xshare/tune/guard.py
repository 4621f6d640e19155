"""A guard of a server's policy during a search.

If somebody else switches the policy, the search ends, and the new policy stays active.
"""

from typing import Any

from ..live import ADDED, NO_STAGE
from ..live.client import Client, PolicyError
from ..policies.spelling import spell_policy


class SwitchGuard:
    """A server's policy during one search, guarded against switches by others.

    Before and after each switch, the guard compares the server's number of switches with its own. It marks each of its
    policies as a trial, so no other search restores this policy by mistake. `before` is the first answer to GET
    /expert_policy.

    Raises `PolicyError` if the server refuses, or if its policy is another search's trial. Also raises it, and changes
    nothing, if somebody else has switched.
    """

    def __init__(self, server: Client) -> None:
        self.server = server
        self.before = server.get_policy()
        if "switches" not in self.before:  # a server that only chooses draft depths has no policy
            raise PolicyError(f"{server.url}: {NO_STAGE}")
        if self.before["trial"]:
            allowed = f"wait for its end, or if it was killed, use sglang-xshare policy set {server.url} POLICY first"
            raise PolicyError(f"{server.url}: its policy is another search's trial; {allowed}")
        self._switches = int(self.before["switches"])
        self._asking = False

    def get_policy(self) -> dict[str, Any]:
        """Return the answer to GET /expert_policy. Raises `PolicyError` if somebody else has switched."""
        answer = self.server.get_policy()
        if answer["switches"] != self._switches:
            count = f"switch {answer['switches']} in place of {self._switches}"
            raise PolicyError(f"{self.server.url}: somebody else has switched its policy ({count}), which stays active")
        return answer

    def set_policy(self, policy: dict[str, Any]) -> None:
        """Switch to a policy. Raises `PolicyError` if somebody else has switched."""
        self._asking = True
        if not self._switch(policy | {"trial": True}, self._switches):
            self._asking = False
            self.get_policy()
        self._switches += 1  # before `_asking` ends, because `restore` must try this number after an interrupt
        self._asking = False

    def restore(self) -> bool:
        """Switch back to `before`, unless another client has switched. Return whether the server switched back."""
        # If the client was interrupted during a switch, the server may have completed the switch.
        numbers = range(self._switches, self._switches + self._asking + 1)
        return any(self._switch(self.before, number) for number in numbers)

    def _switch(self, policy: dict[str, Any], after: int) -> bool:
        """Switch if the server has made exactly `after` switches. Return whether it has switched.

        If two clients send this request, only one of them succeeds.
        """
        try:
            self.server.set_policy(policy | {"after": after})
        except PolicyError as error:
            if error.status is None or self.server.get_policy()["switches"] == after:
                raise
            return False
        return True

    def __str__(self) -> str:
        """Return the policy that `restore` sets, as written on a command line."""
        keys = {name: value for name, value in self.before.items() if name not in (*ADDED, "policy")}
        return spell_policy(self.before["policy"], keys)
