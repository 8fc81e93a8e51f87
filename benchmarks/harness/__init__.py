"""Step time, memory and compilation of a model under every way to train it, side by side: what `compare.py` prints.

`catalog` and `targets` list names, and do not import torch. `models` and `contenders` build what they name,
`preparing` and `measuring` run it, `results` holds the measurements, `table` and `page` show them.
"""
