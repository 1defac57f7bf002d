"""Errors of the embedded server, in the form in which vLLM 0.30 answers them."""

from __future__ import annotations


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: the HTTP status.
        body: vLLM's error object.
    """

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def invalid(where: str, what: str) -> ApiError:
    """A field of the wrong type or shape, worded like the validation errors of vLLM's routes."""
    return ApiError(
        f"1 validation error:\n  {{'loc': '{where}', 'msg': '{what}'}}", param=where, kind="Bad Request"
    )


def bad_value(message: str, name: str, value: object) -> ApiError:
    """A parameter whose value cannot be taken, and why."""
    return ApiError(f"{message} (parameter={name}, value={value})", param=name)


def out_of_range(name: str, rule: str, value: object) -> ApiError:
    """A parameter outside its range."""
    return bad_value(f"{name} must be {rule}, got {value}.", name, value)


def out_of_length(prompt_tokens: int, max_tokens: int, longest: int) -> ApiError:
    """A completion that could grow longer than the model allows."""
    return bad_value(
        f"This model's maximum context length is {longest} tokens. However, you requested {max_tokens} output "
        f"tokens and your prompt contains {prompt_tokens} input tokens, for a total of "
        f"{prompt_tokens + max_tokens} tokens. Please reduce the length of the input prompt or the number of "
        "requested output tokens.",
        "input_tokens",
        prompt_tokens,
    )


def unknown_model(name: object) -> ApiError:
    """A request for a model that is not the served one."""
    return ApiError(f"The model `{name}` does not exist.", param="model", status=404, kind="NotFoundError")


def not_supported(name: str) -> ApiError:
    """A parameter that this server cannot honour, and whose silent loss would change the answer."""
    return ApiError(
        f"the embedded server does not support {name}: leave it out, or ask a real vLLM server", param=name
    )


def internal(error: Exception) -> ApiError:
    """A fault of the server's own."""
    message = f"the embedded server failed: {type(error).__name__}: {error}"
    return ApiError(message, status=500, kind="InternalServerError")
