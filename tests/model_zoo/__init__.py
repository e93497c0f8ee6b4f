"""Real models of timm and Hugging Face transformers, small and with random weights: ``make test-zoo``."""
