"""drafthead.train.learning: the training loop, its steps and evaluations, and the engine that
shares them.
"""
