"""Errors that a client sees, as OpenAI writes them."""

from fastapi import HTTPException
from starlette.exceptions import HTTPException as AnyHttpException

CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # OpenAI's, by which SDKs decide

MOST_CHARACTERS = 500  # of a sentence


class ApiError(HTTPException):
    """A request that is refused: a status, a sentence, the field that it is about, and its code."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        # Of what a client sends, which some sentences quote, not more than people read.
        super().__init__(status, message[:MOST_CHARACTERS])
        self.param, self.code = param and param[:MOST_CHARACTERS], code or CODES.get(status)


def not_supported(field: str) -> ApiError:
    """The error of a field that is neither read nor known to change nothing."""
    sentence = f"{field} is not supported by this server: leave it out"
    return ApiError(400, sentence, field, "unsupported_parameter")


def beyond_context(most: int, rest: str, field: str) -> ApiError:
    """The error of a prompt that is too long, in words by which clients choose a longer model."""
    sentence = f"This model's maximum context length is {most} tokens, {rest}"
    return ApiError(400, sentence, field, "context_length_exceeded")


def error_body(error: AnyHttpException) -> dict[str, dict[str, str | None]]:
    """The JSON of an error."""
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    param = getattr(error, "param", None)
    about = {"type": kind, "param": param and whole(param), "code": getattr(error, "code", None)}
    return {"error": {"message": whole(str(error.detail)), **about}}


def whole(text: str) -> str:
    """A text with a question mark for each half of a surrogate pair, which is no character."""
    return text.encode(errors="replace").decode()
