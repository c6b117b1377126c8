"""From a model, devices and a staleness budget to the best layout and its configuration."""
