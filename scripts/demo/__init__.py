"""drafthead.scripts.demo: how the models and prompts of the demo are made."""
