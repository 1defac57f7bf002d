"""Every error that rtk raises on purpose. Each message says what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rtk.session.many import SampleFailure


class RtkError(Exception):
    """Base of all of rtk's errors."""


class MissingPackage(RtkError, ModuleNotFoundError):
    """What was called needs a package that is not installed; the message says which, and how to install it."""


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


class ServerTimeout(ServerUnreachable):
    """The server did not answer within a limit that the caller set; the message names it."""


class UnknownModel(ServerError):
    """The server does not serve the model that was named, or serves several and none was named."""


class RequestRejected(ServerError):
    """The server answered with a 4xx status: the request is at fault. Only 429, too many requests, is sent again.

    Attributes:
        status: the HTTP status.
        retry_after_s: seconds that the server asks to wait (Retry-After); None where it does not say.
    """

    def __init__(self, message: str, *, url: str, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(message, url=url)
        self.status = status
        self.retry_after_s = retry_after_s


class ServerFailed(ServerError):
    """The server answered with a 5xx status, or reported an error in the middle of a stream.

    Attributes:
        status: the HTTP status; 200 where the error came inside a stream.
        retry_after_s: seconds that the server asks to wait (Retry-After); None where it does not say.
    """

    def __init__(self, message: str, *, url: str, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(message, url=url)
        self.status = status
        self.retry_after_s = retry_after_s


class FanOutError(ServerError):
    """A call that goes to every server failed on some of them. None was stopped: each answered or failed.

    Attributes:
        url: the first server that failed.
        failures: what went wrong, by the server's address.
        answers: what the others answered, by the server's address.
    """

    def __init__(self, call: str, failures: Mapping[str, Exception], answers: Mapping[str, Any]) -> None:
        self.failures = dict(failures)
        self.answers = dict(answers)
        why = "".join(f"\n  {_line(error, url)}" for url, error in self.failures.items())
        rest = "It succeeded on none"
        if self.answers:
            rest = (
                f"It succeeded on {', '.join(self.answers)}. The servers differ now: call it again, or undo it "
                "where it succeeded"
            )
        super().__init__(
            f"{call} failed on {len(self.failures)} of {len(self.failures) + len(self.answers)} servers:{why}\n{rest}",
            url=next(iter(self.failures)),
        )


class BatchError(RtkError):
    """Some items of a batch (prompts, or texts to tokenize) failed; the others were finished, and are kept.

    Attributes:
        failures: what went wrong, by the item's place in the batch, from 0.
        results: what came back, by the item's place in the batch.
    """

    def __init__(self, failures: Mapping[int, Exception], results: Mapping[int, Any]) -> None:
        # Exception pickles its arguments, so both stand in them.
        super().__init__(dict(failures), dict(results))
        self.failures = dict(failures)
        self.results = dict(results)

    def __str__(self) -> str:
        shown = [f"\n  item {place}: {_line(error)}" for place, error in list(self.failures.items())[:8]]
        more = "\n  ..." if len(self.failures) > len(shown) else ""
        total = len(self.failures.keys() | self.results.keys())
        return (
            f"{len(self.failures)} of {total} items of the batch failed (counted from 0):{''.join(shown)}{more}\n"
            f"What came back for {len(self.results)} of them is in this error's .results"
        )


class PromptError(RtkError):
    """A prompt is neither a text, nor token ids, nor chat messages.

    Attributes:
        index: its place among the prompts, from 0; None for a single one.
    """

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class SamplesFileError(RtkError):
    """A file of samples is damaged, in use, of another kind, or belongs to other settings."""


class SamplesFailed(RtkError):
    """Some samples of a `sample_many` failed. The message shows the first few.

    Attributes:
        failures: all of them, each with its prompt and error.
    """

    def __init__(self, failures: Sequence[SampleFailure], total: int) -> None:
        super().__init__(tuple(failures), total)
        self.failures = tuple(failures)
        self.total = total

    def __str__(self) -> str:
        shown = "".join(f"\n  {failure}" for failure in self.failures[:8])
        more = "\n  ..." if len(self.failures) > 8 else ""
        return f"{len(self.failures)} of {self.total} samples failed:{shown}{more}"


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


class SmallSampleWarning(UserWarning):
    """A result was computed of fewer tokens or prompts than it takes to conclude anything; the message says which."""


class LoopError(RtkError):
    """A blocking call was made where it would wait for itself, or its loop is gone."""


def _line(error: Exception, url: str = "") -> str:
    text = f"{type(error).__name__}: {error}".replace("\n", " ")
    return text if url in text else f"{url}: {text}"


def _rebuild(kind: type[ServerError], message: str, state: dict[str, object]) -> ServerError:
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    return error
