"""Functions of tests in a process of Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def interpreted(module: str, function: str, *arguments: object) -> None:
    """Call a function of a test's file with arguments that `repr` writes; what it raises fails."""
    script = f"import {module}; {module}.{function}({', '.join(map(repr, arguments))})"
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr[-4000:]
