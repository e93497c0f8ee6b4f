"""Run a model, and leave everything as it was found."""
