"""Trains a tiny network. The pause makes an update last long enough to be killed in; it changes no number."""

import signal
import time

import claims
import torch
from torch import nn
from torch.nn import functional

from overnight import trainer

DEFAULTS = {"lr": 0.05, "width": 8, "epochs": 4, "pause": 0.04, "every": 4, "deaf_at": 0}


class Noisy(torch.utils.data.Dataset):
    """256 points, each drawn with new noise in every epoch: what was not resumed exactly shows in the weights."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        x = torch.sin(torch.arange(4.0) * (index + 1)) + 0.1 * torch.randn(4)
        return x, x.sum().sign()


def main():
    with trainer.run(defaults=DEFAULTS, every=None) as run:
        claims.claim()
        torch.set_num_threads(1)
        net = nn.Sequential(nn.Linear(4, run.params["width"]), nn.Tanh(), nn.Dropout(0.1))
        net.append(nn.Linear(run.params["width"], 1))
        model = nn.parallel.DistributedDataParallel(net) if run.world_size > 1 else net
        optimizer = torch.optim.SGD(model.parameters(), lr=run.params["lr"], momentum=0.9)
        loader = trainer.DataLoader(Noisy(), global_batch_size=16, shuffle=True)
        run.track(model=model, optimizer=optimizer)
        for x, y in run.batches(loader, epochs=run.params["epochs"]):
            loss = functional.mse_loss(model(x).squeeze(1), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            if run.every(updates=8):
                with torch.no_grad():
                    run.report(score=sum(float(p.abs().sum()) for p in net.parameters()))
            if run.every(updates=run.params["every"]):
                save = run.save()
            if run.step == run.params["deaf_at"] and not run.resumed:
                save.result(timeout=60)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                while True:
                    time.sleep(1.0)
            time.sleep(run.params["pause"])


if __name__ == "__main__":
    main()
