"""Notebooks: committed without output, prose and calls only, and they run on any records."""

from __future__ import annotations

import json

import pytest

from analysis.notebooks import NOTEBOOKS, execute_notebook, notebook_names
from megafold.errors import InputError

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", notebook_names())
def test_committed_without_output(name):
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in code) == 1


@pytest.mark.parametrize("name", ["iteration", "kernels"])
def test_runs_on_records(name, demo, folder_of, monkeypatch):
    monkeypatch.setenv("HOME", "/nonexistent")
    site = folder_of(demo)
    copy = execute_notebook(name, site / "records", site / "notebooks")
    assert copy == site / "notebooks" / f"{name}.ipynb"
    cells = [cell for cell in json.loads(copy.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/svg+xml", "text/html", "text/markdown"} <= kinds
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_unknown_notebook_and_empty_records_are_one_line(tmp_path):
    with pytest.raises(InputError, match="no such notebook; there are iteration, kernels"):
        execute_notebook("memory", tmp_path, tmp_path)
    with pytest.raises(InputError, match="holds no record"):
        execute_notebook("kernels", tmp_path, tmp_path)
