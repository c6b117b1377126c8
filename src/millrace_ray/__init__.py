"""The runtime on a Ray cluster: actors on its nodes, and checks of its hosts."""
