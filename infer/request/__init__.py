"""drafthead.infer.request: what a user asks for: prompts, generation options, stop conditions."""
