"""The command, as a user types it."""

import dataclasses
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest

import rtk
from rtk import cli
from rtk.serve import shipped


def test_the_demo_goes_the_whole_road(embedded_server, tmp_path, capsys):
    assert cli.main(["demo", "--url", embedded_server.url, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "max_over_mean" in printed
    assert "pipeline stage 0 of 2: lined up" in printed
    assert "pipeline stage 1 of 2: lined up" in printed
    assert (tmp_path / "out" / "usage.png").read_bytes().startswith(b"\x89PNG")
    assert "<h2>Samples</h2>" in (tmp_path / "out" / "report.html").read_text()
    traces = rtk.load_traces(tmp_path / "out" / "traces.zip")
    domains = shipped.prompts()
    assert len(traces) == sum(map(len, domains.values()))
    assert {trace.source["domain"] for trace in traces} == set(domains)
    for trace, text in zip(traces, [text for texts in domains.values() for text in texts], strict=True):
        assert trace.text.startswith(text)
    with zipfile.ZipFile(tmp_path / "out" / "traces.zip") as archive:
        assert archive.testzip() is None


def test_errors_are_one_line_and_a_status(tmp_path, capsys):
    assert cli.main(["demo", "--url", "http://127.0.0.1:9", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("rtk: no inference server answers at http://127.0.0.1:9/")
    assert error.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_named(embedded_server, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--url", embedded_server.url, "--out", str(tmp_path / "file" / "out")]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nope"], ["serve", "--port", "many"]])
def test_unknown_words_print_the_usage(arguments):
    done = subprocess.run([sys.executable, "-m", "rtk", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: rtk" in done.stderr


def test_serving_what_is_no_model_says_so(tmp_path, capsys):
    pytest.importorskip("transformers", reason="the embedded server needs moe-rtk[embedded]")
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "cannot read the model config" in capsys.readouterr().err


def run_check(tmp_path, trace, layout: str, *more: str) -> int:
    rtk.save_traces([trace], tmp_path / "traces.zip")
    (tmp_path / "layout.yaml").write_text(layout)
    return cli.main(
        ["replay", "check", str(tmp_path / "traces.zip"), "--layout", str(tmp_path / "layout.yaml"), *more]
    )


def test_replay_check_prints_a_table_and_says_by_its_status_what_came_out(tmp_path, trace, capsys):
    assert run_check(tmp_path, trace, "shard: {pipeline_size: 2, pipeline_rank: 1}") == 0
    assert capsys.readouterr().out.startswith("pipeline stage 1 of 2: lined up (1 routers")
    assert run_check(tmp_path, trace, "shard: {pipeline_size: 2}") == 0
    assert capsys.readouterr().out.endswith("2 of 2 lined up\n")

    zeros = dataclasses.replace(trace, routed_experts=np.zeros_like(trace.routed_experts))
    assert run_check(tmp_path, zeros, "shard: {pipeline_size: 2}") == 1
    assert "0 of 2 lined up" in capsys.readouterr().out
    assert run_check(tmp_path, zeros, "shard: {pipeline_size: 2}", "--json") == 1
    assert [report["ok"] for report in json.loads(capsys.readouterr().out)["reports"]] == [False, False]


def test_replay_check_of_bad_input_says_what_is_wrong(tmp_path, trace, capsys):
    assert run_check(tmp_path, trace, "shard: {pp: 2}") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "layout.yaml: shard has no key 'pp'; it knows pipeline_size, " in printed.err
    assert printed.err.count("\n") == 1
    assert run_check(tmp_path, trace, "shard: {pipeline_size: 3}") == 2
    assert "4 layers do not divide evenly over 3" in capsys.readouterr().err
    layout = str(tmp_path / "layout.yaml")
    assert cli.main(["replay", "check", str(tmp_path / "nothing.zip"), "--layout", layout]) == 2
    assert cli.main(["replay", "check", layout, "--layout", layout]) == 2
