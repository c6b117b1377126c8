"""An agent as a process: how it starts, what it is given, and how it ends."""
