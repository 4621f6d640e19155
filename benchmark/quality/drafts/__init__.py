"""The cost and gain of selection in verification, if only some drafts are right."""
