"""Kernels and programs printed from graphs: Triton source and stand-alone Python."""
