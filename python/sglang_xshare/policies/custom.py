"""A free plan by the algebra's own keys: a new idea needs no code."""

from .plan import SelectionPlan
from .registry import register

register("custom", "any", summary="A plan by the algebra's own keys.")(SelectionPlan)
