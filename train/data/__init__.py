"""drafthead.train.data: conversations: read, rendered, tokenised, packed and checked."""
