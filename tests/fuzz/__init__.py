"""Random models, written as source, under every oracle that there is: `python -m tests.fuzz --minutes 60 --seed 1`."""
