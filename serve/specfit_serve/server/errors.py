"""Errors as OpenAI's clients read them."""

from http import HTTPStatus
from typing import Any

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
}


class ApiError(Exception):
    """What a client did wrong, or cannot have now."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,  # the field that is at fault
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = HTTPStatus(status)
        self.param, self.code = param, code
        self.headers: dict[str, str] = {}
        if retry_after_seconds is not None:
            self.headers["Retry-After"] = str(retry_after_seconds)

    def body(self) -> dict[str, Any]:
        """`{"error": …}`."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def wrong(field: str, requirement: str, value: object) -> ApiError:
    """400: `field` must `requirement`, got `value`."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return ApiError(400, f"{field} must {requirement}, got {shown}", param=field)
