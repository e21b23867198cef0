"""drafthead.contrib.encoder_decoder: targets such as T5 and BART."""
