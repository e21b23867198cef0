"""drafthead.heads.objectives: training positions and losses."""
