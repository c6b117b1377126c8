"""Which rows rest."""
