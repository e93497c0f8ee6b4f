"""See the units in the user's own forward pass."""
