"""Does a network have the problem at all? Metrics of a network, and its comparison with a fresh one."""
