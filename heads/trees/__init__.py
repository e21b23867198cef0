"""drafthead.heads.trees: token trees: their form, how they are grown, and how they are filled."""
