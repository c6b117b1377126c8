"""How good a model is on a task, and what a reward says, outside a run."""
