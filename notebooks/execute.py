"""Run the notebooks top to bottom, and keep the figures of cells tagged "keep" as their only outputs.

python notebooks/execute.py [NOTEBOOK ...]     # all of them by default; `make notebooks` does this
"""

from __future__ import annotations

import argparse
import base64
import io
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent
KEEP = "keep"
PNG = "image/png"
_COLOURS = 256  # of a kept figure, which makes its file much smaller
_PIXELS = 850  # of its longer side, at most
_LONGEST_SECONDS = 600  # of one cell


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run every cell in a fresh kernel whose working directory is ``folder``; outputs are put into the notebook."""
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=_LONGEST_SECONDS, kernel_name="python3", resources=place).execute()


def strip(notebook: nbformat.NotebookNode) -> None:
    """Leave sources, and the figures of cells tagged ``keep``, with fewer colours."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        cell.metadata.pop("execution", None)
        figures = [one.data[PNG] for one in cell.outputs if PNG in one.get("data", {})]
        cell.outputs = [_kept(figure) for figure in figures] if KEEP in cell.metadata.get("tags", ()) else []


def _kept(figure: str) -> Any:
    image = Image.open(io.BytesIO(base64.b64decode(figure))).convert("RGB")
    image.thumbnail((_PIXELS, _PIXELS))
    image = image.quantize(_COLOURS, method=Image.Quantize.FASTOCTREE)  # median cut mixes up red and blue
    buffer = io.BytesIO()
    image.save(buffer, format="png", optimize=True)
    data = {PNG: base64.b64encode(buffer.getvalue()).decode()}
    return nbformat.v4.new_output("display_data", data=data)


def main() -> None:
    """Run the notebooks named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(HERE.glob("*.ipynb")))
    for path in parser.parse_args().notebooks:
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        strip(notebook)
        path.write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8")
        print(f"executed {path}")


if __name__ == "__main__":
    main()
