"""Scripts that make data or run checks; none is needed to use NInfer."""
