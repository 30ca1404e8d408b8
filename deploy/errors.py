"""Errors of the configuration, of the command line and of the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass

# Codes that the command line handles.
VERSION_CHANGED = "version_changed"
UNKNOWN_OUTCOME = "unknown_outcome"


class ConfigError(ValueError):
    """An invalid configuration; the message is one line and names the key."""


class StartError(RuntimeError):
    """The configuration is valid, but the application did not start."""


class CallError(RuntimeError):
    """A command's call to the server failed; the message is one line.

    ``code`` is that of the server's error, if any.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class NoAnswerError(CallError):
    """The server does not answer; it may have carried out the call."""


def cause_of(error: Exception) -> str:
    """The last line of an error's text, which is often a remote traceback: the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@dataclass(eq=False)  # not frozen: contextlib writes __traceback__
class ApiError(Exception):
    """An error response in OpenAI's shape.

    Attributes:
        status: HTTP status.
        message: one sentence.
        type: OpenAI's error type.
        param: dotted name of the request field at fault, or None.
        code: OpenAI's machine-readable code, or None.
        retry_after_s: seconds after which another try makes sense, or None.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object that OpenAI's clients read."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """HTTP headers that go with the answer."""
        retry = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return retry | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


CLIENT_GONE = 499  # for logs and metrics


def invalid_value(param: str, reason: str) -> ApiError:
    """A 400 for the value of a request field."""
    text = f"Invalid value for {param}: {reason}."
    return ApiError(400, text, param=param, code="invalid_value")


def overloaded(message: str) -> ApiError:
    """A 503: the server cannot accept the request now."""
    return ApiError(503, message, "server_error", None, "server_overloaded", retry_after_s=1)


def internal(message: str) -> ApiError:
    """A 500: the server failed."""
    return ApiError(500, message, "server_error", None, "internal_error")


def rate_limited(message: str) -> ApiError:
    """A 429: the client is at its limit."""
    return ApiError(429, message, "rate_limit_error", None, "rate_limit_exceeded", retry_after_s=1)


def timed_out() -> ApiError:
    """A 504: the request timed out."""
    return ApiError(
        504,
        "The answer was not ready in the time that this server gives a request; try again, or "
        "ask for fewer tokens.",
        "server_error",
        None,
        "request_timeout",
        retry_after_s=1,
    )
