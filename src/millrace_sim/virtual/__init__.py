"""Virtual time: the event loop, workers and messages, seeded faults, a digest of all events."""
