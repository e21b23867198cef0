"""drafthead.scripts.leaderboard: every head trained alike, then raced."""
