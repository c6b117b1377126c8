"""Which known fault a run has, and what shows it."""
