"""Metrics of an episode that more than one role knows."""

ENVIRONMENT_S = "environment_s"
"""Of an episode with a budget of seconds: those that its environment took until now."""
