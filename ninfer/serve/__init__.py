"""HTTP: protocols in, protocols out. Knows no tensors; the engine is another process."""
