"""drafthead.heads.drafting: the seam between whatever drafts and the engine that verifies."""
