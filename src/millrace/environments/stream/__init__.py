"""The stream of prompts: which part and which row each group has."""
