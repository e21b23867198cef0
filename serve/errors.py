"""Errors that a client sees, as OpenAI writes them."""

from fastapi import HTTPException


class ApiError(HTTPException):
    """A request that is refused: a status, a sentence, and the field that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(status, message)
        self.param = param


def not_supported(field: str) -> ApiError:
    """The error of a field that is neither read nor known to change nothing."""
    return ApiError(400, f"{field} is not supported by this server: leave it out", field)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, object]:
    """The JSON of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    param = param and whole(param)
    return {"error": {"message": whole(message), "type": kind, "param": param, "code": status}}


def whole(text: str) -> str:
    """A text with a question mark for each half of a surrogate pair, which is no character."""
    return text.encode(errors="replace").decode()
