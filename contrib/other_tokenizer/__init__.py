"""drafthead.contrib.other_tokenizer: draft models that write another vocabulary."""
