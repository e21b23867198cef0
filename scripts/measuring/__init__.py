"""drafthead.scripts.measuring: verbs that measure: how fast, where the time goes, and whether
answers are exact.
"""
