"""drafthead.lab.paying: whether drafting pays on another machine, by acceptance and costs."""
