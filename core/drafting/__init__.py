"""drafthead.core.drafting: the interface between drafters and the engine that verifies."""
