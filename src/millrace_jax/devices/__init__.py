"""The devices of a process: how arrays lie on them, and what is compiled for them."""
