"""One small export when this is imported, so that processes forked from here need not fill the exporter's caches."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from tests.export.zoo import differences

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:
    list(
        differences(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2)),
            (torch.randn(4, 3, 5, 5),),
            {},
            Path(folder),
        )
    )
