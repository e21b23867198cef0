"""drafthead.lab.exactness: tests that answers are the target's own."""
