"""The reward of mathematics: what a completion takes as its answer, and whether it is the reference."""
