"""A training that forgets to track two of its parts, under conditions that ``CONDITIONS`` (JSON) sets."""

import json
import os
import signal

import torch
from torch.optim.swa_utils import AveragedModel

from overnight import trainer

PARTS = ("model", "optimizer", "scheduler", "average")


def main() -> None:
    conditions = json.loads(os.environ.get("CONDITIONS", "{}"))
    with trainer.run(defaults={"tracked": ",".join(PARTS[:2])}, every=2) as run:
        torch.set_num_threads(conditions.get("threads", 1))
        torch.use_deterministic_algorithms(conditions.get("deterministic", False))
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        average = AveragedModel(model)
        parts = dict(zip(PARTS, (model, optimizer, scheduler, average), strict=True))
        run.track(**{name: parts[name] for name in run.params["tracked"].split(",")})
        for step in run.steps(8):
            print(f"update {step} on rank {run.rank}", flush=True)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average.update_parameters(model)
            if step == conditions.get("leaves_at"):
                os.kill(os.getpid(), signal.SIGTERM)


main()
