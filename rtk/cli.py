"""The `rtk` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rtk.errors import EmbeddedServerError, RtkError
from rtk.extras import install
from rtk.serve import shipped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 1 after an error, which is printed."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except RtkError as error:
        print(f"rtk: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rtk", description="See which expert did what in a Mixture-of-Experts language model."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve", help="serve a small MoE model on this machine's CPU, speaking vLLM's HTTP"
    )
    serve.add_argument(
        "model", nargs="?", type=Path, help="folder of the model (default: the tiny model of rtk)"
    )
    serve.add_argument(
        "--port", type=int, default=8000, help="loopback port; 0 takes a free one (default: 8000)"
    )
    serve.add_argument(
        "--max-model-len", type=int, help="longest sequence in tokens (default: the model's own)"
    )
    serve.add_argument("--served-model-name", help="name to serve it under (default: the folder's name)")
    serve.add_argument(
        "--no-routed-experts", action="store_true", help="answer without routes, as vLLM does by default"
    )
    serve.add_argument("--watch-stdin", action="store_true", help="stop when standard input is closed")
    serve.set_defaults(run=_serve)

    doctor = commands.add_parser(
        "doctor", help="check that a running server gives routes, and that they are plausible"
    )
    doctor.add_argument("url", help="the server's address, for example http://127.0.0.1:8000")
    doctor.add_argument("--model", help="the model's name there, where the server has several")
    doctor.add_argument(
        "--layout",
        type=Path,
        help="the model's config.json, or its folder, where the server does not tell it",
    )
    doctor.add_argument(
        "--api-key-env", metavar="VARIABLE", help="environment variable that holds the server's API key"
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.set_defaults(run=_doctor)

    replay = commands.add_parser("replay", help="bring routes to a Megatron job")
    check = replay.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "check",
        help="check that routes line up with the routers of a Megatron job",
        description="Check that the routes of a trace file line up with the routers of a Megatron job.",
        epilog="Exit status: 0 everything is lined up; 1 something is not; 2 the input cannot be read or does not "
        "belong together. The keys of the layout file are in docs/replay-layouts.md.",
    )
    check.add_argument("trace", type=Path, help="a file of rtk.save_traces")
    check.add_argument(
        "--layout",
        type=Path,
        required=True,
        help="YAML: the job's parallel sizes, its microbatch, its tensors",
    )
    check.add_argument("--json", action="store_true", help="print the reports as JSON")
    check.set_defaults(run=_replay_check)

    demo = commands.add_parser(
        "demo", help="the whole road once: serve, sample, show usage, check the replay"
    )
    demo.add_argument("--out", type=Path, default=Path("out/demo"), help="where to write (default: out/demo)")
    demo.add_argument("--url", help="use this running server instead of the embedded one")
    demo.set_defaults(run=_demo)
    return parser


def _serve(options: argparse.Namespace) -> int:
    try:
        from rtk.serve.app import run
    except ModuleNotFoundError as error:
        raise EmbeddedServerError(f"{error}: the server needs it; {install('embedded')}") from error

    run(
        options.model or shipped.find("tiny_moe"),
        port=options.port,
        max_model_len=options.max_model_len,
        served_model_name=options.served_model_name,
        routed_experts=not options.no_routed_experts,
        watch_stdin=options.watch_stdin,
    )
    return 0


def _doctor(options: argparse.Namespace) -> int:
    """0: nothing failed. 1: a check failed. 2: there was nothing to examine."""
    from rtk.layout.model_layout import ModelLayout
    from rtk.session import connect

    try:
        layout = ModelLayout.from_config(options.layout) if options.layout else None
        with connect(options.url, model=options.model, layout=layout, api_key=_api_key(options)) as session:
            report = session.doctor()
    except RtkError as error:
        print(f"rtk: {error}", file=sys.stderr)
        return 2
    print(report.to_json(indent=2) if options.json else report)
    return 0 if report.ok else 1


def _replay_check(options: argparse.Namespace) -> int:
    """0: lined up. 1: not lined up. 2: there was nothing to compare."""
    from rtk.replay.checks import layout_file
    from rtk.trace.file import load_traces

    try:
        layout = layout_file.LayoutFile.read(options.layout)
        reports = list(layout.reports(load_traces(options.trace)))
    except RtkError as error:
        print(f"rtk: {error}", file=sys.stderr)
        return 2
    ok = all(report.ok for _, report in reports)
    print(layout_file.as_json(reports) if options.json else layout_file.as_text(reports))
    return 0 if ok else 1


def _api_key(options: argparse.Namespace) -> str | None:
    if options.api_key_env is None:
        return None
    try:
        return os.environ[options.api_key_env]
    except KeyError as error:
        raise RtkError(f"--api-key-env: there is no environment variable {options.api_key_env}") from error


def _demo(options: argparse.Namespace) -> int:
    from rtk.demo import run

    return run(options.out, url=options.url)
