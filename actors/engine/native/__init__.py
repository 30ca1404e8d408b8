"""C++ kernels of the CPU path."""
