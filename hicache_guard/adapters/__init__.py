"""The seams of SGLang, one module each. They translate calls into core verbs and hold no policy."""
