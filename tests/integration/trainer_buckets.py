"""A script whose gradients torch deals out to several buckets; at the step ``KILL`` every rank kills itself."""

import os
import signal

import torch
from torch import nn

from overnight import trainer


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(12), index % 3


class Twisted(nn.Module):
    """Uses its layers in another order than it names them, and one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.hidden = nn.Linear(320, 3), nn.Linear(640, 320)
        self.inner, self.first = nn.Linear(640, 640), nn.Linear(12, 640)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.inner(self.first(x).tanh()).relu())
        return self.out(self.hidden(x).tanh())


with trainer.run(defaults={"unused": False, "static": False}, every=None, seed=3) as run:
    net = Twisted()
    run.track(net=net)
    model = nn.parallel.DistributedDataParallel(
        net, find_unused_parameters=run.params["unused"], static_graph=run.params["static"]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    run.track(optimizer=optimizer)
    loader = trainer.DataLoader(Points(), global_batch_size=12, micro_batch_size=2, shuffle=True)
    saved = None
    for x, y in run.batches(loader, epochs=3):
        loss = nn.functional.cross_entropy(model(x), y) / run.accumulate
        loss.backward()
        if str(run.step) == os.environ.get("KILL") and saved is not None:
            saved.result()
            os.kill(os.getpid(), signal.SIGKILL)
        if run.update_now:
            optimizer.step()
            optimizer.zero_grad()
        if run.every(updates=3):
            saved = run.save()
