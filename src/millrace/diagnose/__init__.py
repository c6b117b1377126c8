"""What a run's events and ledger say of it: which known faults it has, and where it is slow."""
