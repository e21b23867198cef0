"""drafthead.train.distillation: the target's own answers to prompts."""
