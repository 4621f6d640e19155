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
"""Fields of an answer beside the policy and its keys. A POST may send them back; only `trial` of them is read."""
ASKED = ("after", "recapture")
"""Fields of a POST beside the policy."""
FAULT = {"fault": True}
"""The mark of a scheduler's answer that failed by a fault of its own, and refused nothing."""
COUNTING_PERIOD = 1.0
"""Seconds between two reads of the counters for GET: a read waits for the device, and any client may send GET."""
