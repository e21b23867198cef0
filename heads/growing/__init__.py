"""drafthead.heads.growing: how drafters grow token trees."""
