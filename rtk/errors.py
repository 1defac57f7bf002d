"""Every error that rtk raises on purpose. Each message says what was wrong, where, and what to do."""

from __future__ import annotations


class RtkError(Exception):
    """Base of all of rtk's errors."""


class ServerError(RtkError):
    """Base of what goes wrong between rtk and an inference server.

    Attributes:
        url: the address that was asked.
    """

    def __init__(self, message: str, *, url: str) -> None:
        super().__init__(message)
        self.url = url

    def __reduce__(self) -> tuple[object, ...]:
        # BaseException pickles its positional arguments only, and would lose the keyword ones.
        return _rebuild, (type(self), str(self), self.__dict__.copy())


class ServerUnreachable(ServerError):
    """No server answered at the address, or it kept dropping the connection."""


class UnknownModel(ServerError):
    """The server does not serve the model that was named, or serves several and none was named."""


class RequestRejected(ServerError):
    """The server answered with a 4xx status: the request is at fault, and is never retried.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, message: str, *, url: str, status: int) -> None:
        super().__init__(message, url=url)
        self.status = status


class ServerFailed(ServerError):
    """The server answered with a 5xx status, or reported an error in the middle of a stream.

    Attributes:
        status: the HTTP status; 200 where the error came inside a stream.
    """

    def __init__(self, message: str, *, url: str, status: int) -> None:
        super().__init__(message, url=url)
        self.status = status


class PayloadError(RtkError):
    """A response, or a part of one, is not what its format promises: corrupt, truncated, or too large."""


class RoutesMissing(RtkError):
    """Routed experts were asked for and the server sent none."""


class LayoutError(RtkError):
    """The model's layout (layers, MoE layers, experts, top-k) is unknown or contradicts itself."""


class TraceError(RtkError):
    """A route trace, or a trace file, is inconsistent or unreadable."""


class ShardError(RtkError):
    """A Megatron shard does not fit the model, or the data for it does not fit the shard."""


class LayoutFileError(RtkError):
    """The layout file of `rtk replay check`, or a file that it names, is unreadable or holds an unknown key."""


class EmbeddedServerError(RtkError):
    """The embedded server could not be started, or died."""


class LoopError(RtkError):
    """A blocking call was made where it would wait for itself, or its loop is gone."""


def _rebuild(kind: type[ServerError], message: str, state: dict[str, object]) -> ServerError:
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    return error
