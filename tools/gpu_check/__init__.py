"""One command that says on a GPU machine, within eight minutes, if the CUDA backend is right and fast."""
