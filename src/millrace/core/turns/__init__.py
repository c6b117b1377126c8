"""Trajectories with several turns."""
