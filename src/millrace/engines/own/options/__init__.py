"""What sampling does if a run asks for it: edits of logits, and records of experts."""
