"""drafthead.infer.answers: what decoding returns, and what is kept for it on the way."""
