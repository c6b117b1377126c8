"""Where workers run: the rules of every runtime here, one runtime a folder."""
