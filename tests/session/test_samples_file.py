"""The file of samples under a disk that fails, a forked child and hands that edit it."""

import errno
import os

import pytest

from rtk.client.result import RemoteGenerateResult
from rtk.errors import SamplesFileError
from rtk.session.sample import Sample
from rtk.session.samples_file import SamplesFile, read_samples

HEADER = {"model": "m", "layout": None, "sampling_params": {}, "routes": False}


def sample(text):
    result = RemoteGenerateResult(
        token_ids=[1], logprobs=None, stop_reason="stop", routed_experts=None, request_id="r"
    )
    return Sample(text=text, prompt_token_ids=[0], result=result, trace=None, prompt_index=0, sample_index=0)


class FullDisk:
    """A file that takes half of the next write and then has no room left."""

    def __init__(self, file):
        self._file = file

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        self._file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_write_that_fails_once_leaves_whole_lines_and_ends_the_writing(tmp_path):
    path = tmp_path / "out.jsonl"
    file = SamplesFile(path, HEADER)
    file.append("a", sample("first"))
    whole, disk = path.read_bytes(), file._file
    file._file = FullDisk(disk)
    with pytest.raises(SamplesFileError, match="No space left"):
        file.append("b", sample("second"))
    file._file = disk  # room again
    with pytest.raises(SamplesFileError, match="nothing more is written"):
        file.append("c", sample("third"))
    file.close()
    assert path.read_bytes() == whole

    again = SamplesFile(path, HEADER)
    assert list(again.done) == ["a"]
    again.append("b", sample("second"))
    again.close()
    assert [one.text for one in read_samples(path)] == ["first", "second"]


def test_closing_frees_the_lock_that_a_forked_child_shares(tmp_path):
    path = tmp_path / "out.jsonl"
    file = SamplesFile(path, HEADER)
    shared = os.dup(file._file.fileno())  # what a fork leaves in the child: the same open file
    try:
        file.close()
        SamplesFile(path, HEADER).close()
    finally:
        os.close(shared)


def test_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "out.jsonl"
    file = SamplesFile(path, HEADER)
    file.append("a", sample("first"))
    file.close()
    with open(path, "ab") as bare:
        bare.write(b"\n \n")
    again = SamplesFile(path, HEADER)
    again.append("b", sample("second"))
    assert again.read("b").text == "second"
    again.close()
    assert [one.text for one in read_samples(path)] == ["first", "second"]
