"""The plasticity methods: each a small value that acts around the optimizer's step."""
