"""Analysis is light: it loads neither torch nor the model, and touches no display."""

from __future__ import annotations

import subprocess
import sys


def test_analysis_loads_no_torch(repository):
    code = (
        "import sys, analysis.captions, analysis.figures, analysis.notebooks, analysis.paper, analysis.report\n"
        "from experiments.spec import load_sweep\n"
        "load_sweep('iteration', size='demo')\n"
        "heavy = {'torch', 'alphafold3_pytorch', 'triton', 'papermill'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'matplotlib.backends.backend_tkagg' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
