"""Run the notebooks: prose and calls, committed without output; the executed copy lies with the results."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.record import read_records
from megafold.errors import InputError

NOTEBOOKS = Path(__file__).parent / "notebooks"
REPOSITORY = NOTEBOOKS.parents[1]


def notebook_names() -> tuple[str, ...]:
    """The notebooks that the project ships."""
    return tuple(sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))


def execute_notebook(name: str, records: Path, folder: Path, *, timeout_s: int = 300) -> Path:
    """Execute the notebook `name` on the records below `records` and write the executed copy to `folder`/<name>.ipynb.

    The kernel is this process's interpreter. It needs no network, and no home folder that can be written to.

    Raises:
        InputError: for an unknown notebook, or where `records` holds no or a broken record.
        papermill.exceptions.PapermillExecutionError: where a cell fails; the copy then holds the traceback.
    """
    if name not in notebook_names():
        raise InputError(name, "", f"no such notebook; there are {', '.join(notebook_names())}")
    if not read_records(Path(records)):
        raise InputError(records, "", "holds no record (*.json)")
    out = Path(folder) / f"{name}.ipynb"
    out.parent.mkdir(parents=True, exist_ok=True)
    with _own_folders():
        import papermill

        papermill.execute_notebook(
            str(NOTEBOOKS / f"{name}.ipynb"),
            str(out),
            parameters={"records": str(Path(records).resolve())},
            kernel_name="python3",
            cwd=str(REPOSITORY),
            progress_bar=False,
            log_output=False,
            execution_timeout=timeout_s,
        )
    return out


@contextmanager
def _own_folders() -> Iterator[None]:
    """Settings and run-time files of Jupyter, IPython and matplotlib in a folder of their own while a notebook runs."""
    with tempfile.TemporaryDirectory(prefix="megafold-notebook-") as folder:
        wanted = {name: f"{folder}/{name.lower()}" for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR")}
        before = {name: os.environ.get(name) for name in wanted}
        settings = Path(wanted["IPYTHONDIR"]) / "profile_default" / "ipython_kernel_config.py"
        settings.parent.mkdir(parents=True)
        # Errors only: on loopback, the kernel's warning about unencrypted TCP is noise.
        settings.write_text("c.IPKernelApp.log_level = 40\n")
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
