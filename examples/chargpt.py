"""Train a small GPT, byte by byte, on the source text of Python's standard library.

Runs as it is in three ways, and continues exactly where it stopped in each::

    python examples/chargpt.py --width 128 --depth 4
    torchrun --nproc-per-node 2 examples/chargpt.py
    overnight run examples/chargpt.py --lr 1e-3

The text is on every machine that has Python, so nothing is downloaded. The defaults take about a minute on one core.
"""

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from overnight import trainer

DEFAULTS = {
    "lr": 2e-3,
    "warmup": 50,
    "weight_decay": 0.1,
    "width": 96,
    "depth": 3,
    "heads": 4,
    "context": 64,
    "global_batch": 32,
    "micro_batch": 16,
    "samples": 16_384,
    "epochs": 1,
}
VOCABULARY = 256
MAX_BYTES = 4 << 20


def load_text(max_bytes: int = MAX_BYTES) -> Tensor:
    """Source files of the standard library in alphabetical order, as bytes [N] of type uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


class Windows(torch.utils.data.Dataset[Tensor]):
    """Windows of ``context + 1`` bytes at random places. Which place depends on the sample and epoch alone."""

    def __init__(self, text: Tensor, context: int, num_samples: int) -> None:
        self.text, self.context, self.num_samples = text, context, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        start = int(torch.randint(0, len(self.text) - self.context, ()))
        return self.text[start : start + self.context + 1].long()


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a normalisation and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.feed_norm(x))


class GPT(nn.Module):
    """Maps bytes [B, T] to logits [B, T, 256]."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, context: int, num_windows: int = 128) -> float:
    """Loss on evenly spaced windows of the validation text."""
    starts = torch.linspace(0, len(text) - context - 1, num_windows).long()
    windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return loss_of(model, windows.to(next(model.parameters()).device)).item()


def main() -> None:
    with trainer.run(defaults=DEFAULTS) as run:
        p = run.params
        text = load_text()
        split = len(text) * 9 // 10
        net = GPT(p["width"], p["depth"], p["heads"], p["context"]).to(run.device)
        model = nn.parallel.DistributedDataParallel(net) if run.world_size > 1 else net
        optimizer = torch.optim.AdamW(model.parameters(), lr=p["lr"], weight_decay=p["weight_decay"], betas=(0.9, 0.95))
        loader = trainer.DataLoader(
            Windows(text[:split], p["context"], p["samples"]),
            global_batch_size=p["global_batch"],
            micro_batch_size=p["micro_batch"],
        )
        total = p["epochs"] * loader.updates_per_epoch

        def rate(update: int) -> float:
            cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, update / total)))
            return min(1.0, (update + 1) / p["warmup"]) * (0.1 + 0.9 * cosine)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        run.track(model=model, optimizer=optimizer, scheduler=scheduler)

        for windows in run.batches(loader, epochs=p["epochs"]):
            loss = loss_of(model, windows.to(run.device))
            (loss / run.accumulate).backward()
            if run.update_now:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                run.log(loss=loss)
            if run.every(updates=max(1, total // 8)):
                with run.phase("eval"):
                    val_loss = evaluate(net, text[split:], p["context"])
                run.report(val_loss=val_loss)
                if run.rank == 0:
                    print(f"step {run.step:5d}  loss {loss.item():.3f}  val_loss {val_loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
