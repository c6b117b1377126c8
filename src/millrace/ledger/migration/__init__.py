"""Files of older formats."""
