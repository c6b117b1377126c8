"""The kinds of engines, and their capabilities."""
