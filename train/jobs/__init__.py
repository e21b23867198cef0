"""drafthead.train.jobs: what all long jobs share: progress, Ctrl-C, locks on outputs, full disks,
fingerprints.
"""
