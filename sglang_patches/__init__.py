"""Semantic patches for an SGLang checkout, as ``hicache_guard.patches``. Step 2 fills it."""
