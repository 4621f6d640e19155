"""Control of a running server's expert policy: the HTTP routes, and the subcommands `policy` and `top`."""

PATH = "/expert_policy"
METHOD = "expert_policy"
"""The name of the control messages that carry GET and POST requests to SGLang's schedulers."""
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
"""The fields of an answer besides the policy and its keys. A POST may contain them, but the server reads only `trial`.
"""
ASKED = ("after", "recapture")
"""Further fields that only a POST may contain."""
FAULT = {"fault": True}
"""A scheduler answers with this content after an internal error. A refusal has no content."""
COUNTING_PERIOD = 1.0
"""The minimum time between two reads of the counters for GET, in seconds. A read waits for the device, and clients may
send GET as often as they like.
"""
NO_STAGE = (
    "this server was started without an expert policy; start it with --expert-policy, such as --expert-policy observe, "
    "which routes as the model does until it is switched"
)
