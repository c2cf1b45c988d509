"""Train a small convolutional network on scikit-learn's scanned digits.

Runs as it is in three ways, and continues exactly where it stopped in each::

    python examples/digits.py --lr 0.05
    torchrun --nproc-per-node 2 examples/digits.py
    overnight run examples/digits.py --lr 0.05

1,797 grey images of 8 x 8 pixels; one trial of the default length takes about five seconds on one core.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

from overnight import trainer

DEFAULTS = {
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "width": 16,
    "dropout": 0.1,
    "batch_size": 32,
    "epochs": 12,
}
NUM_VALIDATION = 360


Digits = tuple[Tensor, Tensor]
"""Images of shape [num, 1, 8, 8] in 0..1, and their labels [num]."""


def load_digits() -> tuple[Digits, Digits]:
    """Those to train on and those held out, the same ones in every trial.

    Reads the file inside scikit-learn without importing scikit-learn, which alone would cost a second per trial.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise SystemExit("The digits come with scikit-learn: pip install scikit-learn")
    table = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.int64)
    images = torch.from_numpy(table[:, :64]).float().reshape(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(table[:, 64])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, training = order[:NUM_VALIDATION], order[NUM_VALIDATION:]
    return (images[training], labels[training]), (images[held_out], labels[held_out])


class Augmented(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Digits, shifted by up to one pixel and slightly noisy. Which shift depends on the sample and epoch alone."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = functional.pad(images, (1, 1, 1, 1)), labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row, column = torch.randint(0, 3, (2,)).tolist()
        image = self.images[index, :, row : row + 8, column : column + 8]
        return image + 0.05 * torch.randn_like(image), self.labels[index]


def build(width: int, dropout: float) -> nn.Module:
    """Two convolutions, one hidden layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8 * width, 10),
    )


def optimize(model: nn.Module, params: Mapping[str, Any], num_updates: int) -> tuple[SGD, OneCycleLR]:
    """SGD whose learning rate rises and falls once."""
    optimizer = SGD(
        model.parameters(),
        lr=params["lr"],
        momentum=params["momentum"],
        weight_decay=params["weight_decay"],
        nesterov=params["momentum"] > 0,
    )
    return optimizer, OneCycleLR(optimizer, max_lr=params["lr"], total_steps=num_updates, cycle_momentum=False)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images whose digit is recognised."""
    model.eval()
    hits = float((model(images).argmax(1) == labels).float().mean())
    model.train()
    return hits


def main() -> None:
    with trainer.run(defaults=DEFAULTS) as run:
        epochs, device = run.params["epochs"], run.device
        training, held_out = load_digits()
        val_images, val_labels = (part.to(device) for part in held_out)
        loader = trainer.DataLoader(Augmented(*training), global_batch_size=run.params["batch_size"], shuffle=True)

        net = build(run.params["width"], run.params["dropout"]).to(device)
        model = nn.parallel.DistributedDataParallel(net) if run.world_size > 1 else net
        optimizer, scheduler = optimize(model, run.params, epochs * loader.updates_per_epoch)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)

        for images, labels in run.batches(loader, epochs=epochs):
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            run.log(loss=loss, lr=scheduler.get_last_lr()[0])

            if run.every(updates=loader.updates_per_epoch):
                with run.phase("eval"):
                    val_accuracy = accuracy(net, val_images, val_labels)
                run.state["best"] = max(val_accuracy, run.state.get("best", 0.0))
                run.report(val_accuracy=val_accuracy)
                if run.rank == 0:
                    print(f"step {run.step:4d}  loss {loss.item():.3f}  val_accuracy {val_accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
