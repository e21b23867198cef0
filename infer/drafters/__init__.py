"""drafthead.infer.drafters: drafters that are not trained heads."""
