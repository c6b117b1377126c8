"""What engines recorded beside tokens, as arrays."""
