"""First on PYTHONPATH, this has every process of an embedded server replace what a CPU lacks."""

from hicache_guard.embedded import faults, replacements

replacements.install()
faults.install()
