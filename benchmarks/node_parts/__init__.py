"""The parts of `node.py`. Each takes a `Setting`, and notes its figures as it gets them."""
