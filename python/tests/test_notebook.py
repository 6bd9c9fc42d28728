"""Answers in a notebook: a cell is executed, and its output is HTML with a picture."""

from __future__ import annotations

import os
import xml.etree.ElementTree as tree
from pathlib import Path

import pytest
import shadow

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

RECORDING = shadow.REPOSITORY / "tools" / "recording" / "run-0.pickle.xz"


def test_cell_shows_the_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in shadow.environment().items():
        monkeypatch.setenv(name, value)
    cell = f"import oomph\noomph.advise({str(RECORDING)!r})"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    page = output["data"]["text/html"]
    assert "expandable_segments:True" in page
    picture = tree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert len(list(picture.iter())) > 5
    # To be looked at in a browser.
    if "OOMPH_NOTEBOOK_PAGE" in os.environ:
        Path(os.environ["OOMPH_NOTEBOOK_PAGE"]).write_text(
            f"<!doctype html><meta charset=utf-8>{page}"
        )
