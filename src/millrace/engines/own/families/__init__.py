"""Parts of a layer that only some families have: gates by their activation, and mixtures of experts."""
