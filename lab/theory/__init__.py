"""drafthead.lab.theory: what the theory of speculative decoding predicts."""
