"""Results of simulated runs: numbers, comparisons of schedules, text."""
