"""Which units are reset."""
