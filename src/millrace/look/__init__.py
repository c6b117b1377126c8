"""A run as people look at it: a page that is live, a file to send, a comparison, a card in a notebook.

Three kinds of modules. Queries read a run directory and return plain records: `steps`, `story`, `runs`,
`samples`. `figures` and `parts` turn records into plots and HTML; they read nothing. `server`, `report`,
`simulated` and `card` are the shells. Nothing here writes into a run directory.
"""
