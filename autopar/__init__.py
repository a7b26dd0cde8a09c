"""autopar turns a single-GPU PyTorch model into a distributed program."""

__version__ = "0.1.0"
