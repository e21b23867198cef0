"""What every layer uses and knows no head: targets, caches, trees, sampling, drafting."""
