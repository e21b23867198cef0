"""drafthead.train.features: the frozen target's features of packed rows: computed, or kept on
disk.
"""
