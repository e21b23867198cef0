"""drafthead.infer.scheduling: requests that wait, are read, share batches and leave them."""
