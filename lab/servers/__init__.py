"""drafthead.lab.servers: heads in servers of other software."""
