"""Three small trainings that hold everything that makes exact resume hard; the soak kills them at random moments.

``mlp``: AdamW, dropout, padded tails, nested loops. ``cnn``: SGD with momentum, BatchNorm, augmentation that draws from
all generators, loader workers. ``gpt``: dropout, weighted draws, gradient scaling with skipped steps, warm-up, clipped
gradients. All accumulate, follow a schedule, keep an average (EMA) and save both by interval and by ``run.save()``.

Every micro-batch is written down, with the random numbers that the process drew, before anything else can happen.
"""

import json
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from overnight import trainer
from overnight.trainer import rng, start

DEFAULTS = {"kind": "mlp", "epochs": 6, "every": "4", "keep": 2, "save_every": 5, "workers": 0}
NUM_SAMPLES = 77
GLOBAL_BATCH, MICRO_BATCH = 12, 2
CONTEXT, VOCABULARY = 12, 32


class Points(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Points in 12 dimensions."""

    def __init__(self) -> None:
        self.points = torch.randn(NUM_SAMPLES, 12, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], index % 3


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Pictures that are flipped, shifted and made noisy by the three default generators."""

    def __init__(self) -> None:
        self.pictures = torch.randn(NUM_SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(6))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.pictures[index]
        if random.random() < 0.5:
            picture = picture.flip(-1)
        picture = picture.roll(int(np.random.randint(-2, 3)), dims=-1)
        return picture + 0.1 * torch.randn(picture.shape), index % 3


class Windows(torch.utils.data.Dataset[Tensor]):
    """Windows of a text at random places."""

    def __init__(self) -> None:
        self.text = torch.randint(0, VOCABULARY, (500,), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        start = int(torch.randint(0, 5, ())) + 6 * index
        return self.text[start : start + CONTEXT + 1]


class CharGPT(nn.Module):
    """Two blocks with dropout; the embedding and the head share their weights."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(0.1 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 32, 0.1, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.places
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden)


def build(kind: str) -> nn.Module:
    """The network of a training."""
    if kind == "cnn":
        front = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
        return nn.Sequential(*front, nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3))
    if kind == "gpt":
        return CharGPT()
    return nn.Sequential(nn.Linear(12, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 3))


def make_loader(kind: str, workers: int) -> trainer.DataLoader:
    """Shuffled with padding, shuffled with dropping, weighted."""
    sizes: dict[str, Any] = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": MICRO_BATCH, "num_workers": workers}
    if kind == "gpt":
        return trainer.DataLoader(Windows(), weights=np.arange(1, NUM_SAMPLES + 1), **sizes)
    if kind == "cnn":
        return trainer.DataLoader(Pictures(), shuffle=True, **sizes)
    return trainer.DataLoader(Points(), shuffle=True, tail="pad", **sizes)


def make_optimizer(kind: str, net: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer and its schedule."""
    if kind == "cnn":
        sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        return sgd, torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 40)
    if kind == "gpt":
        adam = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True)
        return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, (step + 1) / 10))
    weights, biases = ([p for p in net.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.01)
    return adam, torch.optim.lr_scheduler.StepLR(adam, step_size=7, gamma=0.8)


class Training:
    """The tracked objects of one training and one update of it."""

    def __init__(self, run: trainer.Run) -> None:
        self.run, self.kind = run, str(run.params["kind"])
        self.net = build(self.kind)
        self.is_gang = run.world_size > 1
        self.model = self._wrapped() if self.is_gang else self.net
        self.optimizer, self.schedule = make_optimizer(self.kind, self.net)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=6, enabled=self.kind == "gpt")
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=self.kind == "cnn")
        self.loader = make_loader(self.kind, int(run.params["workers"]))
        tracked = {"model": self.net, "optimizer": self.optimizer, "schedule": self.schedule, "ema": self.ema}
        sabotage = os.environ["SOAK_SABOTAGE"] if run.resumed else ""
        if sabotage == "ema":
            del tracked["ema"]
        run.track(**tracked, scaler=self.scaler)
        if sabotage == "random":
            rng.restore = lambda state: None
        if sabotage == "position":
            run._cursor._loader_states["main"]["position"] += GLOBAL_BATCH
        token = f"{os.environ['OVERNIGHT_ATTEMPT']}.{os.environ['OVERNIGHT_GENERATION']}"
        self.notes = (run.trial_dir / f"notes-{token}-{run.rank}.jsonl").open("ab", buffering=0)

    def _wrapped(self) -> nn.Module:
        # DDP sorts its buckets anew after its first backward pass, in every process: where three or more gradients are
        # added, the order of a sum, and its last bit, depends on the place in the bucket. With this option it does not.
        return nn.parallel.DistributedDataParallel(self.net, find_unused_parameters=self.run.world_size > 2)

    def loss_of(self, batch: Any) -> Tensor:
        """Mean over the samples that are no padding."""
        if self.kind == "gpt":
            logits = self.model(batch[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        losses = functional.cross_entropy(self.model(batch[0]), batch[1], reduction="none")
        weights = self.loader.sample_weight
        return (losses * weights).sum() / max(1.0, float(weights.sum()))

    def train(self, batches: Iterator[Any]) -> None:
        """The loop."""
        for batch in batches:
            waits = self.is_gang and not self.run.update_now
            with self.model.no_sync() if waits else nullcontext():
                loss = self.loss_of(batch)
                self.scaler.scale(loss / self.run.accumulate).backward()
            if self.run.update_now:
                self.update(loss)
            self.note(loss)

    def update(self, loss: Tensor) -> None:
        """One step of everything; the scaler skips those whose gradients overflow."""
        run = self.run
        if self.kind == "gpt" and run.step % 9 == 4:
            next(self.net.parameters()).grad.view(-1)[0] = float("inf")
        self.scaler.unscale_(self.optimizer)
        if self.kind == "gpt":
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.kind != "cnn")
        self.schedule.step()
        self.ema.update_parameters(self.net)
        run.state["sum"] = run.state.get("sum", 0.0) + loss.item()
        run.log(loss=loss, rate=self.schedule.get_last_lr()[0])
        if run.every(updates=int(run.params["save_every"])):
            run.save()

    def note(self, loss: Tensor) -> None:
        """What the soak compares: in one write, which a kill cannot tear."""
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        self.notes.write(json.dumps([self.run.step, loss.item().hex(), *drawn]).encode() + b"\n")


def main() -> None:
    """One start of a training."""
    every = os.environ["SOAK_EVERY"]
    interval = int(every) if every.isdigit() else every
    if os.environ["SOAK_SABOTAGE"] == "checkpoints":
        start.open_newest = lambda place, reader: None
    with trainer.run(defaults=DEFAULTS, every=interval, keep=int(os.environ["SOAK_KEEP"])) as run:
        training = Training(run)
        epochs = int(run.params["epochs"])
        if training.kind == "mlp":
            for _ in run.epochs(epochs):
                training.train(run.batches(training.loader))
                run.save()
                run.state["random"] = float(torch.rand(()))
        else:
            training.train(run.batches(training.loader, epochs=epochs))
        run.report(sum=run.state["sum"])
        Path(run.trial_dir / "done").touch()


main()
