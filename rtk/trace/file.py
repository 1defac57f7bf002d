"""Traces in a file, without loss, readable without rtk."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk.errors import TraceError
from rtk.layout.model_layout import ModelLayout
from rtk.trace.route_trace import RouteTrace

_FORMAT = "rtk-traces"
_VERSION = 1


def save_traces(traces: Iterable[RouteTrace], path: str | os.PathLike[str]) -> None:
    """Write traces to one file, without loss.

    The file is a zip archive that needs no rtk to be read: `traces.json` with everything that is not an
    array, and for trace number i the NumPy files `i/token_ids.npy`, `i/routed_experts.npy` and, where
    there are any, `i/logprobs.npy`. The file appears whole or not at all.
    """
    traces = list(traces)
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "traces": [
            {
                "token_text": list(trace.token_text),
                "prompt_tokens": trace.prompt_tokens,
                "layout": trace.layout.to_dict(),
                "source": trace.source,
                "has_logprobs": trace.logprobs is not None,
            }
            for trace in traces
        ],
    }
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("traces.json", json.dumps(header, ensure_ascii=False))
            for number, trace in enumerate(traces):
                _write_array(archive, f"{number}/token_ids.npy", trace.token_ids)
                _write_array(archive, f"{number}/routed_experts.npy", trace.routed_experts)
                if trace.logprobs is not None:
                    _write_array(archive, f"{number}/logprobs.npy", trace.logprobs)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_traces(path: str | os.PathLike[str]) -> list[RouteTrace]:
    """Read the traces that `save_traces` wrote, validating each as it is made.

    Raises:
        TraceError: there is no such file, it is truncated or corrupt, it is no trace file, or it was
            written by a newer version of rtk.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read("traces.json"))
            if not isinstance(header, dict) or header.get("format") != _FORMAT:
                raise TraceError(f"{path} is a zip archive but no rtk trace file")
            if header.get("version") != _VERSION:
                raise TraceError(
                    f"{path} has trace format version {header.get('version')}; this rtk reads version {_VERSION}"
                )
            return [_read_trace(archive, number, fields) for number, fields in enumerate(header["traces"])]
    except FileNotFoundError as error:
        raise TraceError(f"there is no trace file {path}") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except Exception as error:  # a damaged archive makes zipfile raise nearly anything
        raise TraceError(f"{path} is no readable trace file, or is damaged: {error}") from error


def _read_trace(archive: zipfile.ZipFile, number: int, fields: Mapping[str, Any]) -> RouteTrace:
    return RouteTrace(
        token_ids=_read_array(archive, f"{number}/token_ids.npy"),
        token_text=tuple(fields["token_text"]),
        prompt_tokens=fields["prompt_tokens"],
        routed_experts=_read_array(archive, f"{number}/routed_experts.npy"),
        layout=ModelLayout(**fields["layout"]),
        logprobs=_read_array(archive, f"{number}/logprobs.npy") if fields["has_logprobs"] else None,
        source=fields["source"],
    )


def _write_array(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(name, "w", force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


def _read_array(archive: zipfile.ZipFile, name: str) -> npt.NDArray[Any]:
    # Reading the member whole first compares its checksum before the shape in it is believed.
    array: npt.NDArray[Any] = np.lib.format.read_array(io.BytesIO(archive.read(name)), allow_pickle=False)
    return array
