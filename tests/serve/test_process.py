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


def test_a_server_that_does_not_come_up_is_stopped(model_folder, monkeypatch):
    monkeypatch.setattr("rtk.serve.process._START_TIMEOUT_S", 0.1)
    with pytest.raises(EmbeddedServerError, match="did not answer within"):
        rtk.serve.embedded(model_folder)


@pytest.fixture
def broken_torch(tmp_path, monkeypatch):
    """Puts a torch that cannot be imported in front of the real one, for child processes."""

    def install(error):
        (tmp_path / "torch.py").write_text(f"raise {error!r}")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def test_missing_packages_are_named(broken_torch, model_folder):
    broken_torch(ModuleNotFoundError("No module named 'torch'"))
    with pytest.raises(EmbeddedServerError, match=r"pip install 'moe-rtk\[embedded\]'"):
        rtk.serve.embedded(model_folder)


def test_a_failure_to_start_carries_what_the_server_printed(broken_torch, model_folder):
    broken_torch(ImportError("libgomp.so.1: cannot open shared object file"))
    with pytest.raises(EmbeddedServerError, match=r"did not start \(exit status 1\)") as caught:
        rtk.serve.embedded(model_folder)
    assert str(caught.value).endswith("libgomp.so.1: cannot open shared object file")
