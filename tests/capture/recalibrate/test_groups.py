"""`cpt_fx.recalibrate` in a process group: statistics are averaged over it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import cpt_fx
from tests.capture.recalibrate.models import few, images, net, statistics
from tests.ir.state.models import DYNAMIC, plan

SHARES = ([0, 1], [2])
"""Which batches each of two processes has: the second has fewer, and a smaller one."""


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    result = cpt_fx.transform(net(), plan(), recipe=DYNAMIC)
    parallel = DistributedDataParallel(result)
    parallel(images(8, rank)).square().mean().backward()
    pair = distributed.new_group([0, 1])
    own = DistributedDataParallel(copy.deepcopy(result), process_group=pair)
    found: dict[str, Any] = {"before": statistics(result)}
    share = [few()[index] for index in SHARES[rank]]
    with cpt_fx.recalibrate(parallel.module, share):
        found["inside"] = statistics(result)
    found["after"] = statistics(result)
    with cpt_fx.recalibrate(parallel, share):
        found["wrapper"] = statistics(result)
    cpt_fx.recalibrate(own, share)
    found["group"] = statistics(own.module)
    with cpt_fx.recalibrate(parallel.module, few() if rank == 0 else []):
        found["one has none"] = statistics(result)
    parallel.train()
    parallel(images(8, rank)).square().mean().backward()
    found["gradient"] = result.conv.weight.grad  # type: ignore[union-attr]
    try:
        cpt_fx.recalibrate(parallel.module, [])
    except ValueError as error:
        found["error"] = str(error)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(one[key], other[key], rtol=1e-5, atol=1e-6) for key in one)


@pytest.mark.slow
def test_statistics_are_those_of_all_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, args=(str(tmp_path),), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = cpt_fx.transform(net(), plan(), recipe=DYNAMIC)
    cpt_fx.recalibrate(alone, few())
    for key in ("inside", "wrapper", "group", "one has none"):
        assert equal(first[key], second[key])
        assert close(first[key], statistics(alone)), key
    for found in (first, second):
        assert equal(found["before"], found["after"])
        assert "there were none" in found["error"]
    assert not close(first["before"], second["before"])
    assert torch.equal(first["gradient"], second["gradient"])


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_group_of_one(wrapped: bool) -> None:
    result = cpt_fx.transform(net(), plan(), recipe=DYNAMIC)
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model: nn.Module = DistributedDataParallel(result) if wrapped else result
        cpt_fx.recalibrate(model, few(), exclude="norm")
    finally:
        distributed.destroy_process_group()
    alone = cpt_fx.transform(net(), plan(), recipe=DYNAMIC)
    cpt_fx.recalibrate(alone, few(), exclude="norm")
    assert equal(statistics(alone), statistics(result))
