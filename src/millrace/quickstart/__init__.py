"""The model, the sabotage and the checks of `millrace quickstart`."""
