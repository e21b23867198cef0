"""drafthead.lab.races: ways of decoding timed in turns on the same prompts."""
