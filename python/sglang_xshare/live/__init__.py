"""Live control of a running server's expert policy: its HTTP routes, and the subcommand `policy`."""

PATH = "/expert_policy"
METHOD = "expert_policy"
"""The method of the control messages that carry GET and POST to SGLang's schedulers."""
ADDED = (
    "in_force",
    "plan_hash",
    "exact_rule",
    "limits",
    "counters",
    "since_switch",
    "counted_ago",
    "switches",
    "disagreement",
    "trial",
    "estimated_acceptance",
    "draft_depth",
    "warnings",
    "recaptured",
    "recapture_seconds",
)
"""Fields of an answer beside the policy and its keys. A POST may contain these fields; only `trial` is read."""
ASKED = ("after", "recapture")
"""Fields of a POST beside the policy."""
FAULT = {"fault": True}
"""The mark of a scheduler's answer that reports an internal error, not a refusal."""
COUNTING_PERIOD = 1.0
"""Seconds between two reads of the counters for GET: a read waits for the device, and any client may send GET."""
NO_STAGE = (
    "this server was started without an expert policy; start it with --expert-policy, such as --expert-policy observe, "
    "which routes as the model does until it is switched"
)
