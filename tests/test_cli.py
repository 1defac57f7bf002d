"""The command, as a user types it."""

import subprocess
import sys
import zipfile

import pytest

import rtk
from rtk import _shipped, cli


def test_the_demo_goes_the_whole_road(embedded_server, tmp_path, capsys):
    assert cli.main(["demo", "--url", embedded_server.url, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "max_over_mean" in printed
    assert "pipeline stage 0 of 2: lined up" in printed
    assert "pipeline stage 1 of 2: lined up" in printed
    assert (tmp_path / "out" / "usage.png").read_bytes().startswith(b"\x89PNG")
    assert "<h2>Samples</h2>" in (tmp_path / "out" / "report.html").read_text()
    traces = rtk.load_traces(tmp_path / "out" / "traces.zip")
    domains = _shipped.prompts()
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
    pytest.importorskip("transformers", reason="the embedded server needs rtk[embedded]")
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == 1
    assert "cannot read the model config" in capsys.readouterr().err
