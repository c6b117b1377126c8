"""Many seeded worlds full of faults, and the promises that hold in each."""
