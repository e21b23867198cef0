"""The base of every layer, which knows no head: targets, caches, trees, sampling, drafting."""
