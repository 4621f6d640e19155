"""Live control of a running server's expert policy: its HTTP routes, and the verb `policy`."""

PATH = "/expert_policy"
METHOD = "expert_policy"
"""What marks the control message of upstream's that carries a question of ours."""
