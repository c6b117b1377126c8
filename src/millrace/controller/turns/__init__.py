"""Turns: which worker answers which request, and what an answer does to a trajectory."""
