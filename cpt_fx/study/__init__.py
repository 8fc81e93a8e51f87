"""Train one task under many schedules, keep every result, and compare them.

from cpt_fx import study

def train(schedule, seed):     # your own training, from nothing
    ...
    return accuracy

study.run(train, store="study.sqlite", total_steps=800).write("report")
"""

from cpt_fx.study.critical_periods import EXPERIMENTS, critical
from cpt_fx.study.records import Record
from cpt_fx.study.running import Study, load, run

__all__ = ["EXPERIMENTS", "Record", "Study", "critical", "load", "run"]
