"""Errors that a user can act on: one sentence that names the file, the value and the fix."""


class UserError(ValueError):
    """Input that cannot be used. The command line prints its message alone and exits with 2."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where there is none."""
    return str(error).strip().partition("\n")[0] or repr(error)


def reason_of(error: BaseException) -> str:
    """The reason that the system gives for its own errors; an error's first line for others."""
    return getattr(error, "strerror", None) or first_line(error)
