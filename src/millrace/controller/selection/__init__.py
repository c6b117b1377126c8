"""What the trained groups of a row decide: whether the row rests, and what its next group drafts from."""
