"""Draft tokens that one pass verifies: no token and no log-prob depends on them, only the time."""
