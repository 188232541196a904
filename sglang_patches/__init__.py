"""Semantic patches for an SGLang checkout, as ``hicache_guard.patches``."""
