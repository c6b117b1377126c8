"""What a simulated run achieved: numbers, comparisons of schedules, text."""
