"""A user's own schedule."""
