"""drafthead.scripts.models: verbs that bring models, and train, convert and describe draft
heads.
"""
