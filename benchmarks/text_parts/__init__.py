"""The parts of `real_text.py`: what a model writes, and what other programs compute of the same tokens."""
