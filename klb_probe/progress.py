"""Progress bars of library functions: shown in a terminal and in Jupyter, and nowhere else."""

from __future__ import annotations

import sys

from tqdm.auto import tqdm


def progress_bar(total: int, what: str, unit: str, *, initial: int = 0, shown: bool = True) -> tqdm:
    """A bar over ``total`` units of work; ``shown=False`` hides it wherever it is."""
    return tqdm(total=total, initial=initial, desc=what, unit=unit, disable=not (shown and _watched()))


def _watched() -> bool:
    """Whether somebody can see a bar. A notebook's streams are no terminal, which is all that tqdm would ask."""
    return sys.stderr.isatty() or _in_notebook()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config
