"""What engines recorded with the tokens, as the trainer computes with it."""
