"""Measurements of selection in verify steps in which only some draft tokens are right."""
