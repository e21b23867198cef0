"""drafthead.infer.engine: propose, verify, commit."""
