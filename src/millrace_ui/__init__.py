"""A run as people look at it: a live page, a file to send, a comparison, a card in a notebook.

The queries in `record` read a run directory and return plain records. The modules in `drawing` turn records
into HTML, and read nothing. `server`, `report`, `simulated` and `notebook` are the shells. Nothing
here writes into a run directory.
"""
