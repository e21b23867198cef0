"""Errors that a client sees, as OpenAI writes them."""

from fastapi import HTTPException


class ApiError(HTTPException):
    """A request that is refused: a status, a sentence, and the field that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(status, message)
        self.param = param


def error_body(status: int, message: str, param: str | None = None) -> dict[str, object]:
    """The JSON of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
