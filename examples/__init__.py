"""Examples to read and to run."""
