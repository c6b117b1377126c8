"""Sinks that write events into files or send them to services."""
