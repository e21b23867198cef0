"""drafthead.infer.planning: how large a tree is worth its time, by what steps cost and bring."""
