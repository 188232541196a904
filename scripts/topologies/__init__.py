"""Shapes of a deployment, one TOML each, and in ``models`` what each model needs in any of them.

Installed as ``hicache_guard.topologies``; ``hicache_guard.nodes.tables`` says what a file holds.
"""
