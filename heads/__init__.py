"""drafthead.heads: the frozen target, token trees, draft heads and their checkpoints.

Importing the package imports the head families, so that each head registers itself.
"""

import drafthead.heads.families  # noqa: F401
