"""What is compiled, installed as ``hicache_guard.kernels``.

``_books`` and ``_steps``: the guard's bookkeeping on a CPU (see ``core/compiled.py``). The rest is
window attention that refuses dead slots, from ``translate`` to ``window``: see docs/kernels.md.

The name ``kernels`` alone belongs to a package on PyPI that transformers and SGLang look for. From
the repository root Python finds this folder first under that name, so it steps aside: the package
from PyPI takes its place where it is installed; where it is not, an empty module of version 0
stays, which transformers reads as "not available" (a folder without a version makes it fail).
"""

from __future__ import annotations

if __name__ == "kernels":
    import importlib.util
    import sys
    from importlib.machinery import PathFinder
    from pathlib import Path

    _root = Path(__file__).resolve().parent.parent
    _elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != _root]
    _spec = PathFinder.find_spec(__name__, _elsewhere)
    if _spec is not None and _spec.loader is not None:
        sys.modules[__name__] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[__name__])
    else:
        __version__ = "0"
        __path__ = []
