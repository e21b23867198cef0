"""drafthead.infer.loading: targets and drafters by their names."""
