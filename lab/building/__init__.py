"""drafthead.lab.building: `drafthead build`, from a model to the fastest way of decoding it."""
