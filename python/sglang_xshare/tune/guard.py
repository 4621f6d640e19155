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

    If a switch needs a capture of CUDA graphs and the capture fails, the server restores the policy before this switch,
    and its number of switches grows by two. The guard then continues with this number, and raises the server's error.

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
        self._active = _read_policy(self.before)
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
        first, asking = self._switches, self._asking
        try:
            return any(self._switch(self.before, first + more) for more in range(1 + asking))
        except PolicyError:
            # The server may also have undone the switch. `_switch` has then updated the number.
            if not asking or self._switches == first:
                raise
            return self._switch(self.before, self._switches)

    def _switch(self, policy: dict[str, Any], after: int) -> bool:
        """Switch if the server has made exactly `after` switches. Return whether it has switched.

        If two clients send this request, only one of them succeeds. Raises `PolicyError` if the server refuses, or if
        the server has undone the switch because a capture failed.
        """
        try:
            self._active = _read_policy(self.server.set_policy(policy | {"after": after}))
        except PolicyError as error:
            if error.status is None or (now := self.server.get_policy())["switches"] == after:
                raise
            if now["switches"] == after + 2 and _read_policy(now) == self._active:
                self._switches, self._asking = after + 2, False
                raise
            return False
        return True

    def __str__(self) -> str:
        """Return the policy that `restore` sets, as written on a command line."""
        keys = {name: value for name, value in self.before.items() if name not in (*ADDED, "policy")}
        return spell_policy(self.before["policy"], keys)


def _read_policy(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the policy, its keys and its `trial` flag from an answer to GET or POST /expert_policy."""
    return {name: value for name, value in answer.items() if name == "trial" or name not in ADDED}
