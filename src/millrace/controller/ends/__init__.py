"""Ends of trajectories and groups that are not trained."""
