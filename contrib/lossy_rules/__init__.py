"""drafthead.contrib.lossy_rules: acceptance rules whose text is not the target's own."""
