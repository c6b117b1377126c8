"""Attacks on runs in real processes, and checks of the runs afterwards."""
