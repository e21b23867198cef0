"""drafthead.heads.growing: growing trees by measured paths, level by level or by weight."""
