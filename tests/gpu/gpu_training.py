"""A training on the run's device that may be stopped in any step, of one of three kinds.

``eager`` and ``scaler`` (half precision with a GradScaler that skips updates) also train where there is no GPU;
``graph`` replays a whole update from a CUDA graph. ``STOP`` is JSON ``{"step", "signal"}``, sent in that step.
"""

import json
import os

import torch
from torch import nn

from overnight import trainer


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __init__(self) -> None:
        self.points = torch.randn(96, 64, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index], index % 3


class Update:
    """One update of a model, by kind."""

    def __init__(self, run: trainer.Run, kind: str) -> None:
        self.kind, self.device = kind, run.device
        width = 512  # large enough that blocks of parameters are watched and that a copy takes a while
        layers = nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 3)
        self.model = nn.Sequential(*layers).to(run.device)
        on_gpu = run.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.01, fused=on_gpu and kind != "graph", capturable=kind == "graph"
        )
        self.scaler = torch.amp.GradScaler(
            run.device.type, init_scale=2.0**22, growth_interval=4, enabled=kind == "scaler"
        )
        run.track(model=self.model, optimizer=self.optimizer, scaler=self.scaler)

    def loss(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        half = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        with torch.autocast(self.device.type, half, enabled=self.kind == "scaler"):
            return nn.functional.cross_entropy(self.model(points), labels)

    def __call__(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = self.loss(points, labels)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()


class GraphedUpdate(Update):
    """The same, replayed. Warming up and capturing leave weights, moments and random numbers as they were."""

    def __init__(self, run: trainer.Run) -> None:
        super().__init__(run, "graph")
        self.points = torch.zeros(8, 64, device=run.device)
        self.labels = torch.zeros(8, dtype=torch.long, device=run.device)
        kept = [value.clone() for value in self._values()]
        random = torch.cuda.get_rng_state()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                super().__call__(self.points, self.labels)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self._whole_update()
        torch.cuda.set_rng_state(random)
        with torch.no_grad():
            for value, before in zip(self._values(), kept, strict=False):
                value.copy_(before)
            for value in self._values()[len(kept) :]:  # moments that were not there yet
                value.zero_()

    def _values(self) -> list[torch.Tensor]:
        """What an update changes: of the model, then of the optimizer."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.state_dict().values(), *moments]

    def _whole_update(self) -> torch.Tensor:
        loss = self.loss(self.points, self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def __call__(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.points.copy_(points)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.result


def main() -> None:
    torch.use_deterministic_algorithms(True)
    stop = json.loads(os.environ.get("STOP", "null"))
    with trainer.run(defaults={"kind": "eager"}, every=None, seed=3) as run:
        kind = str(run.params["kind"])
        update = GraphedUpdate(run) if kind == "graph" else Update(run, kind)
        log = (run.trial_dir / "losses.jsonl").open("a")
        loader = trainer.DataLoader(Points(), global_batch_size=8, shuffle=True)
        save = None
        for points, labels in run.batches(loader, epochs=2):
            if stop and stop["step"] == run.step:
                if save is not None:
                    save.result(timeout=60)  # how fast the machine writes shall not decide where the next start begins
                os.kill(os.getpid(), stop["signal"])
            loss = update(points.to(run.device, non_blocking=True), labels.to(run.device))
            noise = torch.rand((), device=run.device).item()
            line = [run.step, float(loss).hex(), noise, update.scaler.get_scale()]
            log.write(json.dumps(line) + "\n")
            log.flush()
            if run.step % 4 == 2:  # training goes on for four updates before the next one
                if save is not None:
                    save.result(timeout=60)
                save = run.save()


main()
