"""drafthead.heads.graphs.gpu: what recorded passes on a GPU are made of."""
