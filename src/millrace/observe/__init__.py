"""Shows a run to people and services: sinks, the live view, the doctor, and totals of events."""
