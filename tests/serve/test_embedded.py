"""The server as a child process."""

import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

import rtk
from rtk.errors import EmbeddedServerError


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


def test_starts_serves_and_stops(model_folder):
    with rtk.serve.embedded(model_folder) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert answers(server.url)
        assert "running" in repr(server)
        with rtk.connect(server.url) as session:
            assert session.sample("abc", max_tokens=3).trace.rows == 5
    assert not answers(server.url)
    assert "stopped" in repr(server)
    server.stop()


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_does_not_outlive_a_parent_that_is_killed(model_folder):
    code = (
        "import sys, time, rtk\n"
        f"server = rtk.serve.embedded({str(model_folder)!r})\n"
        "print(server.url, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    url = parent.stdout.readline().strip()
    assert answers(url)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while answers(url) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not answers(url)
    parent.stdout.close()


def test_a_failure_to_start_says_why(tmp_path, model_folder):
    with pytest.raises(EmbeddedServerError, match="cannot read the model config"):
        rtk.serve.embedded(tmp_path)
    with rtk.serve.embedded(model_folder) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(
            EmbeddedServerError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*choose another --port"
        ):
            rtk.serve.embedded(model_folder, port=port)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    # A package of that name that cannot be imported stands in front of the real one.
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError(\"No module named 'transformers'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EmbeddedServerError, match=r"pip install 'rtk\[embedded\]'"):
        rtk.serve.embedded(tmp_path)
