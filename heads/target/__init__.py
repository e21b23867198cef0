"""drafthead.heads.target: the frozen base model behind one interface."""
