"""Train a transformed model in ONNX Runtime, next to PyTorch: same weights, batches and bits.

    python examples/ort_training.py                            # both models, some minutes on two cores
    python examples/ort_training.py --fast                     # a few steps only
    python examples/ort_training.py --picture curves.png       # with a picture of losses and bits

A residual net and a small transformer learn scikit-learn's digits, the transformer row by row. Needs the extra `ort`
(and `demo`, for the picture `viz`): docs/export.md. Stochastic rounding draws different noise in the two, so the
curves are similar, but not equal.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import cpt_fx

CLASSES, BATCH = 10, 64


class Residual(nn.Module):
    """A convolution, a residual block, and a linear layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.head = nn.Linear(width * 4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        x = F.relu(self.stem(images.unsqueeze(1)))
        x = F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return self.head(F.avg_pool2d(x, 4).flatten(1))


class Transformer(nn.Module):
    """One encoder layer over the eight rows of an image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rows, self.places = nn.Linear(8, width), nn.Parameter(torch.randn(8, width) / 10)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:  # noqa: D102
        return self.head(self.layer(self.rows(images) + self.places).mean(1))


MODELS = {
    "residual net": (Residual, lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)),
    "transformer": (Transformer, lambda parameters: torch.optim.AdamW(parameters, lr=2e-3)),
}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bunch = load_digits()
    images, labels = torch.tensor(bunch.images, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    test = torch.arange(len(labels)) % 3 == 0
    return images[~test], labels[~test], images[test], labels[test]


def compare(name: str, steps: int, progress: Progress) -> dict[str, list[float]]:
    """Train a model in both; return losses, bits, seconds per step and the share of test images recognised."""
    torch.manual_seed(0)
    train_images, train_labels, test_images, test_labels = digits()
    make, optimizer_of = MODELS[name]
    schedule = cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=steps)
    model = cpt_fx.transform(make(), schedule, example_inputs=(train_images[:BATCH],)).train()
    optimizer = optimizer_of(model.parameters())
    found: dict[str, list[float]] = {key: [] for key in ("torch", "ort", "bits", "torch seconds", "ort seconds")}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "exported")
        cpt_fx.export.ort_training(model, (train_images[:BATCH],), directory, loss="cross_entropy", optimizer=optimizer)
        # A separate schedule: each side advances after its own update.
        trainer = cpt_fx.ort.Trainer(
            directory,
            cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=steps),
            threads=torch.get_num_threads(),
        )
        for _ in progress.track(range(steps), description=name):
            batch = torch.randint(len(train_labels), (BATCH,))
            images, labels = train_images[batch], train_labels[batch]
            found["bits"].append(schedule.bits(schedule.position).weight)
            began = time.perf_counter()
            found["ort"].append(trainer.step(images, labels))
            between = time.perf_counter()
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            found["torch"].append(loss.item())
            found["torch seconds"].append(time.perf_counter() - between)
            found["ort seconds"].append(between - began)
        _, scores = trainer.evaluate(test_images, test_labels)
        found["ort accuracy"] = [(torch.as_tensor(scores).argmax(1) == test_labels).float().mean().item()]
        model.eval()
        with torch.no_grad():
            found["torch accuracy"] = [(model(test_images).argmax(1) == test_labels).float().mean().item()]
            # Copy the trained values back to PyTorch.
            trainer.to_torch(model)
            back = (model(test_images).argmax(1) == test_labels).float().mean().item()
        found["back in torch"] = [back]
    return found


def picture(results: dict[str, dict[str, list[float]]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(results), figsize=(10, 5.5), sharex="col", height_ratios=(3, 1), squeeze=False)
    for column, (name, found) in enumerate(results.items()):
        above, below = axes[:, column]
        for key, label, colour in (("torch", "PyTorch", "#1f5fd0"), ("ort", "ONNX Runtime", "#c8500a")):
            losses, smooth = found[key], []
            for loss in losses:
                smooth.append(loss if not smooth else 0.95 * smooth[-1] + 0.05 * loss)
            above.plot(losses, color=colour, alpha=0.2, linewidth=0.8)
            above.plot(smooth, color=colour, label=label)
        above.set_title(f"{name}: test accuracy {found['torch accuracy'][0]:.1%} and {found['ort accuracy'][0]:.1%}")
        above.set_yscale("log")
        above.set_ylabel("training loss")
        above.legend()
        below.step(range(len(found["bits"])), found["bits"], color="#555555", where="post")
        below.set_ylabel("bits")
        below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train in ONNX Runtime and in PyTorch, side by side.")
    parser.add_argument("--fast", action="store_true", help="a few steps only")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write losses and bits as a picture")
    options = parser.parse_args()
    steps = 60 if options.fast else options.steps
    table = Table(
        "model", "loss: PyTorch", "ONNX Runtime", "test: PyTorch", "ONNX Runtime", "back in PyTorch", "time a step"
    )
    with Progress(console=Console(stderr=True)) as progress:
        results = {name: compare(name, steps, progress) for name in MODELS}
    for name, found in results.items():
        last = max(steps // 20, 1)
        ratio = median(ours / theirs for ours, theirs in zip(found["ort seconds"], found["torch seconds"], strict=True))
        table.add_row(
            name,
            *(f"{sum(found[key][-last:]) / last:.3f}" for key in ("torch", "ort")),
            *(f"{found[key][0]:.1%}" for key in ("torch accuracy", "ort accuracy", "back in torch")),
            f"{ratio:.2f} of PyTorch's",
        )
    Console().print(table)
    if options.picture is not None:
        picture(results, options.picture)


if __name__ == "__main__":
    main()
