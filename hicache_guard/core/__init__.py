"""The proof machinery: generations, versioned mappings, free checks. Torch, not SGLang."""
