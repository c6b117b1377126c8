"""Evaluates a model on a task, and tries a reward, outside a run."""
