"""drafthead.scripts.building: what `drafthead build` runs, stage by stage."""
