"""Typed configuration: load, merge, validate, freeze; once, before anything runs."""
