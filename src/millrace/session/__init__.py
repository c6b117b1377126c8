"""The composition root: the only package that names concrete classes of roles and puts a run together."""
