"""Samples in a file, one JSON line each, written so that a killed process loses none that is finished.

The first line is a header: `format`, `version`, `model`, `layout`, `sampling_params`, `routes`. Each further line is a
sample: `asked` (a digest of prompt, parameters and place), `prompt_index`, `sample_index`, `text`, `prompt_token_ids`,
`token_ids`, `logprobs`, `stop_reason`, `request_id`, `token_text`, `source` and `routed_experts`, the base64 text of a
`.npy` file of shape `[prompt + generated - 1, layers, top_k]`.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from rtk.client import routed_experts
from rtk.client.result import RemoteGenerateResult
from rtk.errors import RtkError, SamplesFileError
from rtk.layout.model_layout import ModelLayout
from rtk.session.sample import Sample
from rtk.trace.route_trace import RouteTrace

_FORMAT = "rtk-samples"
_VERSION = 1


def read_samples(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """The samples of a file that `Session.sample_many(out=...)` wrote, one at a time, in the order of their completion.

    A file may be read while it is written; a last line without its end is one that is not yet finished, and is
    left out.

    Args:
        path: the file.

    Raises:
        SamplesFileError: there is no such file, it is of another kind, or a line is damaged; the message has its
            number.
    """
    path = Path(path)
    with _opened(path) as file:
        header = _header(path, file)
        for number, line in enumerate(file, start=2):
            if line.endswith(b"\n") and line.strip():
                yield _sample(_parsed(line, f"{path}, line {number}"), header, f"{path}, line {number}")


class SamplesFile:
    """A file of samples that is open for writing; one process at a time may have it.

    Args:
        path: the file; made where it is not there.
        header: what its samples have in common: `model`, `layout`, `sampling_params`, `routes`.

    Attributes:
        done: where the line of each finished sample begins, by what was asked.

    Raises:
        SamplesFileError: the file is of another kind, damaged, in use by another process, or has another header.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        self._path = Path(path)
        self._header = {"format": _FORMAT, "version": _VERSION, **header}
        self._lock = threading.Lock()
        self._failed = False
        self.done: dict[str, int] = {}
        try:
            self._file: BinaryIO = open(self._path, "a+b", buffering=0)  # noqa: SIM115 - closed by close
        except OSError as error:
            raise SamplesFileError(f"{self._path} cannot be written: {error}") from error
        try:
            _take(self._file, self._path)
            self._drop_torn_line()
            self._file.seek(0)
            if self._file.seek(0, os.SEEK_END) == 0:
                self._write(self._header)
            self._index()
        except BaseException:
            self._file.close()
            raise

    def append(self, asked: str, sample: Sample) -> None:
        """Write one sample; when this returns it is on the disk.

        Raises:
            SamplesFileError: the disk is full or fails. What was written of the line is cut off again, and nothing
                more is appended by this object.
        """
        line = {"asked": asked, **_plain(sample)}
        with self._lock:
            self.done[asked] = self._write(line)

    def read(self, asked: str) -> Sample:
        """A finished sample, read from the disk."""
        with open(self._path, "rb") as file:
            file.seek(self.done[asked])
            return _sample(_parsed(file.readline(), str(self._path)), self._header, str(self._path))

    def close(self) -> None:
        """Give the file free for others, when a write that has begun is finished. Reading goes on."""
        with self._lock:
            if not self._file.closed:
                _give_free(self._file)
                self._file.close()

    def _write(self, value: Mapping[str, Any]) -> int:
        if self._failed:
            raise SamplesFileError(
                f"nothing more is written to {self._path}, since a write to it failed: mend that, and run the same "
                "call again; it asks only for what is missing"
            )
        left = memoryview(orjson.dumps(value) + b"\n")
        start = self._file.seek(0, os.SEEK_END)
        try:
            while left:  # an unbuffered write may stop halfway
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except BaseException as error:
            # A torn line that others followed would make the whole file unreadable.
            self._failed = True
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            if not isinstance(error, OSError):
                raise
            raise SamplesFileError(
                f"{self._path} cannot be written: {error}. The samples in it are whole: make room, and run the same "
                "call again; it asks only for what is missing"
            ) from error
        return start

    def _drop_torn_line(self) -> None:
        """Cut off what a process that was killed in the middle of a write left behind."""
        size = self._file.seek(0, os.SEEK_END)
        end = size
        while end > 0:  # backwards to the last end of a line
            start = max(end - 2**16, 0)
            self._file.seek(start)
            found = self._file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end == size:
            return
        if end == 0:
            # Not one whole line: only a header that was cut is ours to drop.
            self._file.seek(0)
            if not self._file.read(2**10).startswith(b'{"format":"rtk-samples"'):
                raise SamplesFileError(f"{self._path} is no file of samples; choose another name for out=")
        warnings.warn(
            f"{self._path}: the last line was cut in the middle of a write; its {size - end} bytes are dropped, and "
            "its sample is asked for again",
            stacklevel=2,
        )
        self._file.truncate(end)

    def _index(self) -> None:
        self._file.seek(0)
        with open(self._path, "rb") as file:
            found = _header(self._path, file)
            for name, wanted in self._header.items():
                if found.get(name) != wanted:
                    raise SamplesFileError(
                        f"{self._path} holds samples with {name}={found.get(name)!r}, and these are to have {wanted!r}: "
                        "choose another file, or the same settings"
                    )
            start = file.tell()
            for number, line in enumerate(file, start=2):
                if not line.strip():
                    start += len(line)
                    continue
                asked = _parsed(line, f"{self._path}, line {number}").get("asked")
                if not isinstance(asked, str):
                    raise SamplesFileError(
                        f"{self._path}, line {number}: the line does not say what was asked"
                    )
                self.done[asked] = start
                start += len(line)


def _take(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows; there nothing stops a second process
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise SamplesFileError(
            f"{path} is being written by another process, or by another call of this one: wait for it, or choose "
            "another file"
        ) from error


def _give_free(file: BinaryIO) -> None:
    """Unlock the file itself: a child that was forked meanwhile has it open too, and would go on holding the lock."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_UN)


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise SamplesFileError(f"{path} cannot be read: {error}") from error


def _header(path: Path, file: BinaryIO) -> dict[str, Any]:
    try:
        header = orjson.loads(file.readline(2**20))
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise SamplesFileError(f"{path} is no file of samples")
    if header.get("version") != _VERSION:
        raise SamplesFileError(
            f"{path} has version {header.get('version')} of the format; this rtk reads version {_VERSION}"
        )
    return header


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = orjson.loads(line)
    except ValueError as error:
        raise SamplesFileError(f"{where} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise SamplesFileError(f"{where} is damaged: it holds no JSON object")
    return value


def _plain(sample: Sample) -> dict[str, Any]:
    result, trace = sample.result, sample.trace
    encoded = None
    if result.routed_experts is not None:
        file = io.BytesIO()
        np.save(file, np.ascontiguousarray(result.routed_experts), allow_pickle=False)
        encoded = base64.b64encode(file.getbuffer()).decode("ascii")
    return {
        "prompt_index": sample.prompt_index,
        "sample_index": sample.sample_index,
        "text": sample.text,
        "prompt_token_ids": sample.prompt_token_ids,
        "token_ids": result.token_ids,
        "logprobs": result.logprobs,
        "stop_reason": result.stop_reason,
        "request_id": result.request_id,
        "token_text": None if trace is None else list(trace.token_text),
        "source": None if trace is None else trace.source,
        "routed_experts": encoded,
    }


def _sample(fields: Mapping[str, Any], header: Mapping[str, Any], where: str) -> Sample:
    try:
        encoded = fields["routed_experts"]
        result = RemoteGenerateResult(
            token_ids=fields["token_ids"],
            logprobs=fields["logprobs"],
            stop_reason=fields["stop_reason"],
            routed_experts=None if encoded is None else routed_experts.decode(encoded),
            request_id=fields["request_id"],
        )
        trace = None
        if fields["token_text"] is not None and result.routed_experts is not None:
            trace = RouteTrace(
                token_ids=fields["prompt_token_ids"] + result.token_ids,
                token_text=tuple(fields["token_text"]),
                prompt_tokens=len(fields["prompt_token_ids"]),
                routed_experts=result.routed_experts,
                layout=ModelLayout(**header["layout"]),
                logprobs=result.logprobs,  # type: ignore[arg-type]
                source=fields["source"],
            )
        return Sample(
            text=fields["text"],
            prompt_token_ids=fields["prompt_token_ids"],
            result=result,
            trace=trace,
            prompt_index=fields["prompt_index"],
            sample_index=fields["sample_index"],
        )
    except (KeyError, TypeError, RtkError) as error:
        raise SamplesFileError(f"{where} is damaged: {type(error).__name__}: {error}") from error
