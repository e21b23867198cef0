"""drafthead.heads.growing: how token trees are grown, by measured paths, level by level or by weight."""
