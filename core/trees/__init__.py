"""drafthead.core.trees: token trees: their form, and how they are filled."""
