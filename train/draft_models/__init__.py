"""Small language models that draft: cut out of a target, and trained by the same loop as heads."""
