"""A residual network with BatchNorm: what can be reset, with the residual stream or without it, and an exact resume.

Prints two plans of the same model. The inner channels of a block are one layer's own, and always resettable. A channel
of the residual stream is written by several layers: `residual="group"` resets its row in all of them at once. Then the
network learns tasks that rename the digits. Halfway it is saved, and a new model, optimizer and attachment go on from
the file: the two runs end with the same weights to the last bit, after the same resets.

    python examples/resnet.py    # about 12 seconds on one core
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.lab.data import digits


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block1, self.block2, self.head = Block(8, 8, 1), Block(8, 16, 2), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.block2(self.block1(self.stem(x))).mean((2, 3)))


def make(plan=None):
    """Model, optimizer and attachment, as at the start of a process."""
    torch.manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    plan = plan or gxd.find_units(model, torch.zeros(2, 1, 8, 8), residual="group")
    return model, optimizer, gxd.ContinualBackprop(model, optimizer, plan=plan, replacement_rate=1e-3, maturity=50)


def train(parts, data, steps):
    """Steps are numbered from the start of the stream, so that a resumed run sees what the other one saw."""
    model, optimizer, cbp = parts
    model.train()
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        names = torch.randperm(10, generator=torch.Generator().manual_seed(step // 200))  # a new task: other names
        index = torch.randint(len(data.train_images), (32,), generator=chance)
        x, y = data.train_images[index].view(-1, 1, 8, 8) / data.full, names[data.train_labels[index]]
        logits = model(x)
        cbp.observe(logits, y)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()  # this pass leaves no trace in what gxd measures
    with torch.no_grad():
        predicted = model(data.test_images.view(-1, 1, 8, 8) / data.full).argmax(1)
    return (predicted == names[data.test_labels]).float().mean().item()


def main(argv=None):
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=800, help="a task has 200")
    args = options.parse_args(argv)
    half, data, inputs = args.steps // 2, digits(), torch.zeros(2, 1, 8, 8)
    plans = {residual: gxd.find_units(ResNet(), inputs, residual=residual) for residual in ("skip", "group")}
    for residual, plan in plans.items():
        print(f'residual="{residual}"\n{plan}\n')

    parts = make(plans["group"])
    print(f"accuracy after {half} steps: {train(parts, data, range(half)):.3f}, {parts[2].total_resets} resets")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.pt"
        torch.save([part.state_dict() for part in parts], file)
        reached = train(parts, data, range(half, args.steps))
        print(f"accuracy after {args.steps} steps: {reached:.3f}, {parts[2].total_resets} resets")

        resumed = make()  # the rates are settings and no state: they are given anew, as the learning rate may be
        for part, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
    train(resumed, data, range(half, args.steps))
    pairs = zip(parts[0].state_dict().values(), resumed[0].state_dict().values(), strict=True)
    exact = all(torch.equal(one, other) for one, other in pairs) and parts[2].total_resets == resumed[2].total_resets
    print(f"the resumed run is the same to the last bit: {exact}")
    return plans, parts[2], exact


if __name__ == "__main__":
    main()
