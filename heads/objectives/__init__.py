"""drafthead.heads.objectives: what heads learn from, and by which loss."""
