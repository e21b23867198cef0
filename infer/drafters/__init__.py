"""drafthead.infer.drafters: what proposes tokens and is not a trained head."""
