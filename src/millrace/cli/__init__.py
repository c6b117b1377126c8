"""The command line, and the composition root: the only layer that names concrete classes of roles."""
