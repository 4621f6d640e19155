"""Control of a running server's expert policy: the HTTP routes, and the subcommands `policy` and `top`."""

PATH = "/expert_policy"
METHOD = "expert_policy"
"""The method name of the control messages that carry GET and POST requests to SGLang's schedulers."""
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
"""The fields of an answer besides the policy and its keys. A POST may contain them, but only `trial` is read."""
ASKED = ("after", "recapture")
"""The fields that only a POST may have, besides the policy and its keys."""
FAULT = {"fault": True}
"""The content of a scheduler's answer that reports an internal error, not a refusal."""
COUNTING_PERIOD = 1.0
"""The minimum time between two reads of the counters for GET, in seconds. A read waits for the device, and any client
may send GET.
"""
NO_STAGE = (
    "this server was started without an expert policy; start it with --expert-policy, such as --expert-policy observe, "
    "which routes as the model does until it is switched"
)
