"""The small operations of a decoder layer in C++, for CPUs."""
