"""drafthead.scripts.demo: how the demo's models, prompts and figures are made."""
