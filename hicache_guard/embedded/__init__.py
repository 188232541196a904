"""A real SGLang HTTP server on a CPU, of any supported release, serving a tiny hybrid model.

No file of SGLang is changed: what a CPU lacks is replaced as it is imported (``replacements``), and
all else is the release's own.
"""
