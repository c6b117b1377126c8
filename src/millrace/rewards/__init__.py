"""A number for a completion: matchers, functions, judges, sums. `mathematics/` reads final answers."""
