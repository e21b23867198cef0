"""drafthead.infer.serving: requests that come and go."""
