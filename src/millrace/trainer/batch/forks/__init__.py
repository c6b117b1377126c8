"""Trajectories with forks as trees."""
