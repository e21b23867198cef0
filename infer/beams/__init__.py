"""drafthead.infer.beams: beam search, several rounds a pass."""
