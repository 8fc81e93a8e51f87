"""Train a plain residual net on scikit-learn's digits under a cyclic precision schedule.

    python examples/digits.py             # about half a minute on one core
    python examples/digits.py --fast      # a few seconds

The three lines that add low precision are marked.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import cpt_fx


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


def make_model(width: int = 24) -> nn.Module:
    stem = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*stem, Block(width), nn.MaxPool2d(2), Block(width), *head)


def train(steps: int) -> float:
    """Train, and return the share of test images that are recognised at the end."""
    torch.manual_seed(0)
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    test = torch.arange(len(labels)) % 3 == 0
    train_images, train_labels = images[~test], labels[~test]

    model = make_model()
    schedule = cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=steps)  # 1. the bits over the run
    model = cpt_fx.transform(model, schedule)  # 2. the same model, with quantizers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        batch = torch.randint(len(train_labels), (64,))
        loss = F.cross_entropy(model(train_images[batch]), train_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % (steps // 20) == 0:
            print(f"step {step + 1:4}   {schedule.bits(step).weight} bits   loss {loss.item():.4f}")
        schedule.step()  # 3. after each optimizer step

    print(cpt_fx.inspect(model).verify())
    model.eval()
    # Batch norm's running statistics come from the latest widths; these come from the evaluation width.
    with cpt_fx.recalibrate(model, train_images[:640].split(64)), torch.no_grad():
        return (model(images[test]).argmax(dim=1) == labels[test]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a residual net on digits under a cyclic precision schedule.")
    parser.add_argument("--fast", action="store_true", help="a few steps only")
    steps = 80 if parser.parse_args().fast else 800
    print(f"test accuracy {100 * train(steps):.2f} %")


if __name__ == "__main__":
    torch.set_num_threads(1)  # images this small do not keep two threads busy
    main()
