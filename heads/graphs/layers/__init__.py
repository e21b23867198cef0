"""drafthead.heads.graphs.layers: layers that differ in their weights alone, compiled once."""
