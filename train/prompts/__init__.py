"""drafthead.train.prompts: prompts from nothing: what a chat model writes in the user's place, and
tasks about texts.
"""
