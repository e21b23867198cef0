"""drafthead.backends.cpu.layers: layers that differ in their weights alone, compiled once."""
