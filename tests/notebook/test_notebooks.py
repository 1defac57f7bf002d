"""The notebooks run from top to bottom, and what is committed can be read without running them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")

FOLDER = Path(__file__).parent.parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(path: Path):
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebooks_are_there():
    assert [path.name for path in NOTEBOOKS] == ["01_sample_and_inspect.ipynb", "02_replay_check.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path):
    if path.stem.startswith("02"):
        pytest.importorskip("megatron.core", reason="needs moe-rtk[megatron]")
    pytest.importorskip("transformers", reason="needs moe-rtk[embedded]")
    notebook = nbformat.read(path, as_version=4)
    # Raises at the first cell that fails.
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_with_the_outputs_of_one_run(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"text/html", "text/plain"} <= kinds
    text = path.read_text(encoding="utf-8")
    for machine in ("/home/", "/root/", "/tmp/", "/work/", "Warning"):
        assert machine not in text, f"the outputs show {machine}"


def test_the_first_one_shows_its_pictures():
    cells = code_cells(NOTEBOOKS[0])
    pictures = [o for cell in cells for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(pictures) >= 2
    assert any("data:image/png" in str(o.get("data", {}).get("text/html")) for c in cells for o in c.outputs)
