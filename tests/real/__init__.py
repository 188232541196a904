"""Scripts that run in a subprocess with a real SGLang release on the path; see ``serve``."""
