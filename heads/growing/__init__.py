"""drafthead.heads.growing: what drafters share: how they read late, and grow token trees."""
