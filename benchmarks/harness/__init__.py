"""Step time, memory and compilation of a model under every way to train it, side by side: what `compare.py` prints.

`catalog` and `targets` name what there is, and import no torch. `models` and `contenders` build it, `preparing` and
`measuring` run it, `results` holds what came out, `table` and `page` show it.
"""
