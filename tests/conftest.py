"""Makes this folder importable, so that tests of every backend share `conformance`."""
