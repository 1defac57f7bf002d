"""The layout file of `rtk replay check`: a Megatron job, its microbatch and its tensors, in YAML.

docs/replay-layouts.md lists the keys. Names are those of `Shard`, `Batch.padded` and `Batch.packed`.
"""

from __future__ import annotations

import json
import string
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import yaml

from rtk.errors import LayoutFileError
from rtk.layout.model_layout import ModelLayout
from rtk.replay.checks.check import check
from rtk.replay.checks.report import ReplayReport
from rtk.replay.layouts.batch import Batch, alignment
from rtk.replay.layouts.shard import Shard
from rtk.trace import RouteTrace, load_traces

_MODEL = {
    "num_layers": int, "moe_layers": list, "moe_layer_freq": int | str | list, "num_experts": int, "top_k": int,
}  # fmt: skip
_SHARD = {name: hint for name, hint in get_type_hints(Shard).items() if name != "layout"}
_COMMON: dict[str, Any] = {"length": int, "align": int, "fp8": int | str, "last_token": bool}
_BATCH = {"padded": {**_COMMON, "side": str}, "packed": {**_COMMON, "total_align": int}}
_FILE = {
    "model": str | dict, "shard": dict, "batch": dict, "tensors": str, "recorded": str, "reference": str,
    "groups": list, "min_agreement": float,
}  # fmt: skip
# The number of the trace that a report is about, None where it is about all of them.
Numbered = tuple[int | None, ReplayReport]
_RANKS = ("pipeline_rank", "context_rank", "tensor_rank", "expert_rank")


@dataclass(frozen=True)
class LayoutFile:
    """What a layout file says.

    Attributes:
        folder: where it lies; other files are looked for from there.
        model: the model's layout; None where the trace's own is taken.
        shard: arguments of Shard but the layout.
        batch: arguments of the batch, with its `kind`; None where each trace is a microbatch of its own.
        options: arguments of `rtk.replay.check` that need no file.
        tensors, recorded, reference: names of files, None where there are none.
    """

    folder: Path
    model: ModelLayout | None = None
    shard: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tensors: str | None = None
    recorded: str | None = None
    reference: str | None = None

    @classmethod
    def read(cls, path: Path) -> LayoutFile:
        """Read a file, which may be empty.

        Raises:
            LayoutFileError: it cannot be read, is no YAML mapping, or holds an unknown key or a wrong type.
            LayoutError: the model that it describes contradicts itself.
        """
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise LayoutFileError(f"cannot read the layout file {path}: {error.strerror or error}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise LayoutFileError(f"{path} is not YAML: {error}") from error
        try:
            given = _known(content if content is not None else {}, _FILE, "the file")
            folder, batch = path.parent, given.get("batch")
            return cls(
                folder=folder,
                model=_model(given["model"], folder) if "model" in given else None,
                shard=_known(given.get("shard", {}), _SHARD, "shard"),
                batch=None if batch is None else _batch_arguments(batch),
                options={
                    name: tuple(given[name]) if name == "groups" else given[name]
                    for name in ("groups", "min_agreement")
                    if name in given
                },
                tensors=given.get("tensors"),
                recorded=given.get("recorded"),
                reference=given.get("reference"),
            )
        except LayoutFileError as error:
            raise LayoutFileError(f"{path}: {error}") from error

    def shards(self, traces: Sequence[RouteTrace]) -> list[Shard]:
        """The ranks to check: those that the file names, over all of a kind whose rank it leaves out."""
        one = Shard(self.model or traces[0].layout, **self.shard)
        fixed = [name for name in _RANKS if name in self.shard]
        return [
            shard
            for shard in one.every_rank()
            if all(getattr(shard, name) == getattr(one, name) for name in fixed)
        ]

    def reports(self, traces: Sequence[RouteTrace]) -> Iterator[Numbered]:
        """Check every rank.

        Yields:
            the trace's number, None where all traces are one microbatch; and the report.

        Raises:
            RtkError: the traces, the shard and the files do not belong together.
        """
        if not traces:
            raise LayoutFileError("there is no trace to check in the trace file")
        shards = self.shards(traces)
        reference = None if self.reference is None else load_traces(self.folder / self.reference)
        if reference is not None and len(reference) != len(traces):
            raise LayoutFileError(f"reference holds {len(reference)} traces, the trace file {len(traces)}")
        together = self.batch is not None or len(traces) == 1
        if not together and (self.tensors or self.recorded):
            raise LayoutFileError(
                f"tensors and recorded are of one microbatch, and there are {len(traces)} traces: say under batch "
                "how they stand in it"
            )
        if len(shards) > 1 and self.tensors is not None and not _places(self.tensors):
            raise LayoutFileError(
                f"tensors are of one rank, and {len(shards)} are checked: name the ranks under shard, or in the "
                "file's name, as in tensors-{pipeline_rank}.npz"
            )
        for number, group in enumerate([list(traces)] if together else [[trace] for trace in traces]):
            for shard in shards:
                yield (
                    None if together else number,
                    check(
                        group,
                        shard,
                        batch=self._batch(group, shard),
                        reference=(reference if together else [reference[number]]) if reference else None,
                        **self._arrays(shard),
                        **self.options,
                    ),
                )

    def _batch(self, traces: Sequence[RouteTrace], shard: Shard) -> Batch:
        arguments = dict(self.batch or {"kind": "packed"})
        kind, fp8 = arguments.pop("kind"), arguments.pop("fp8", None)
        if kind == "padded":
            arguments.setdefault("align", alignment(shard, fp8=fp8))
            return Batch.padded(traces, **arguments)
        arguments.setdefault("align", alignment(shard))
        arguments.setdefault("total_align", alignment(shard, fp8=fp8))
        return Batch.packed(traces, **arguments)

    def _arrays(self, shard: Shard) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.tensors is not None:
            arrays = _load(self.folder, self.tensors, shard)
            numbers = arrays.pop("layer_numbers", None)
            found["tensors"] = list(arrays.values())
            if numbers is not None:
                found["layer_numbers"] = [int(number) for number in np.ravel(numbers)]
        if self.recorded is not None:
            arrays = _load(self.folder, self.recorded, shard)
            if strange := [name for name in arrays if not name.isdecimal()]:
                raise LayoutFileError(
                    f"recorded names its arrays by layer number, as in np.savez(file, **{{'2': ids}}); {strange[0]!r} "
                    "is none"
                )
            found["recorded"] = {int(name): array for name, array in arrays.items()}
        return found


def as_text(reports: Sequence[Numbered]) -> str:
    """One table where one rank was checked; of many, a line each and the tables of those with faults."""
    if len(reports) == 1:
        return str(reports[0][1])
    lines = []
    for number, report in reports:
        prefix = "" if number is None else f"trace {number}, "
        lines.append(prefix + (report.summary if report.ok else str(report)))
    good = sum(report.ok for _, report in reports)
    return "\n".join([*lines, f"{good} of {len(reports)} lined up"])


def as_json(reports: Sequence[Numbered]) -> str:
    """`{"ok": ..., "reports": [...]}`, each report as `ReplayReport.to_dict` gives it, with its `trace`."""
    return json.dumps(
        {
            "ok": all(report.ok for _, report in reports),
            "reports": [{"trace": number, **report.to_dict()} for number, report in reports],
        },
        indent=2,
    )


def _model(given: str | Mapping[str, Any], folder: Path) -> ModelLayout:
    if isinstance(given, str):
        return ModelLayout.from_config(folder / given)
    fields = _known(given, _MODEL, "model")
    for name in ("num_layers", "num_experts", "top_k"):
        if name not in fields:
            raise LayoutFileError(f"model needs {name}")
    if "moe_layers" in fields and "moe_layer_freq" in fields:
        raise LayoutFileError("model has both moe_layers and moe_layer_freq; leave one out")
    if "moe_layers" in fields:
        if any(type(layer) is not int for layer in fields["moe_layers"]):
            raise LayoutFileError(
                f"moe_layers of model is {fields['moe_layers']!r}; layers are whole numbers"
            )
        return ModelLayout(**fields)
    fields["moe_router_topk"] = fields.pop("top_k")
    return ModelLayout.from_megatron(**fields)


def _batch_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("kind")
    if kind not in _BATCH:
        raise LayoutFileError(f"kind of batch is {kind!r}; it is one of {', '.join(_BATCH)}")
    return _known(given, {"kind": str, **_BATCH[kind]}, f"a {kind} batch")


def _known(given: Any, known: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A mapping with known keys and values of the known types."""
    if not isinstance(given, Mapping):
        raise LayoutFileError(f"{where} is {given!r}; it holds keys and values")
    for name, value in given.items():
        if name not in known:
            raise LayoutFileError(f"{where} has no key {name!r}; it knows {', '.join(known)}")
        if not _fits(value, known[name]):
            raise LayoutFileError(f"{name} of {where} is {value!r}, which is no {_words(known[name])}")
    return dict(given)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if isinstance(value, bool):  # which Python takes for a number
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _words(hint: Any) -> str:
    words = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "true or false",
        list: "list",
        dict: "mapping",
    }
    parts = get_args(hint) or (hint,)
    return " or ".join(words.get(part, repr(part)) for part in parts if part is not types.NoneType)


def _places(name: str) -> set[str]:
    return {place for _, place, _, _ in string.Formatter().parse(name) if place is not None}


def _load(folder: Path, name: str, shard: Shard) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an .npz file whose name may hold ranks, in the file's own order."""
    try:
        unknown = _places(name) - set(_RANKS)
    except ValueError as error:
        raise LayoutFileError(f"cannot read the file name {name!r}: {error}") from error
    if unknown:
        raise LayoutFileError(
            f"the file name {name!r} has {sorted(unknown)}; it may hold {', '.join(_RANKS)}"
        )
    path = folder / name.format(**{rank: getattr(shard, rank) for rank in _RANKS})
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except Exception as error:  # a damaged archive makes NumPy raise nearly anything, a plain array too
        raise LayoutFileError(f"{path} is no readable .npz file of arrays: {error}") from error
