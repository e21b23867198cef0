"""Block-parallel heads: one pass of a small transformer drafts a block of tokens."""
