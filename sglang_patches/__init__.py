"""Semantic patches for an SGLang checkout, installed as ``hicache_guard.patches``. Step 2 fills it."""
