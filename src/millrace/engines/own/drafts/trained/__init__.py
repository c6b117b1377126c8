"""Drafts of the head that is trained beside the policy."""
