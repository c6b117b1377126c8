"""Published measurements of other systems, and what the simulator predicts for them."""
