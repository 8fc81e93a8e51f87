"""What the fuzzer found, shrunk: each file is one model, and red until it is mended."""
