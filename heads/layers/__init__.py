"""drafthead.heads.layers: building blocks of small draft transformers."""
