"""What people and services see of a run: sinks, the live view, the doctor, and totals of events."""
