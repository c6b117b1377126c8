"""Virtual time: the event loop, workers and messages, seeded faults, the digest of what happened."""
