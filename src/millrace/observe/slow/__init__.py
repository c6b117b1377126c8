"""Where a run is slow: the time of each role by its cause, and the bottleneck."""
