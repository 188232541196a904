"""The proof machinery: page generations, versioned mappings, free checks. Knows torch, not SGLang."""
