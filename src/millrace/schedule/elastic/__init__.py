"""Schedules for replicas that come and go."""
