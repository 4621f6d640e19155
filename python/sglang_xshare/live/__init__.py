"""Live control of a running server's expert policy: its HTTP routes, and the subcommand `policy`."""

PATH = "/expert_policy"
METHOD = "expert_policy"
"""What marks the control message of upstream's that carries a question of ours."""
ADDED = (
    "in_force",
    "plan_hash",
    "limits",
    "counters",
    "since_switch",
    "counted_ago",
    "switches",
    "disagreement",
    "trial",
    "estimated_acceptance",
    "warnings",
    "recaptured",
    "recapture_seconds",
)
"""What an answer says beside the policy and its keys; a POST may send it back, and of it only `trial` is read."""
ASKED = ("after", "recapture")
"""What a POST may ask beside the policy."""
COUNTING_PERIOD = 1.0
"""Seconds between two looks of GET at the counters: each waits for the device, and any client may ask."""
