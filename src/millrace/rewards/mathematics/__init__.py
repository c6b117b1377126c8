"""Which answer a text ends with, and whether it equals a reference."""
