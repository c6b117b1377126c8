"""A data set before a run: rows that are broken, repeated, contaminated, too hard or too easy are dropped,
each with a reason."""
