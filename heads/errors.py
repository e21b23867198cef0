"""Errors that a user can act on: one sentence that names the file, the value and the fix."""


class UserError(ValueError):
    """Input that cannot be used. The command line prints its message alone and exits with 2."""
