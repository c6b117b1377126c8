"""How model families write calls of tools: learnt from a chat template, then read in completions."""
