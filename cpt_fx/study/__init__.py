"""Train one task under many schedules, keep every result, and compare them.

from cpt_fx import study

def train(schedule, seed):     # your own training, from scratch
    ...
    return accuracy

study.run(train, store="study.sqlite", total_steps=800).write("report")
"""

from cpt_fx.study.cells import PERIODS as EXPERIMENTS
from cpt_fx.study.records import Record
from cpt_fx.study.running import Study, critical, load, run

__all__ = ["EXPERIMENTS", "Record", "Study", "critical", "load", "run"]
