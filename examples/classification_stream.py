"""A stream of classification tasks in a plain PyTorch loop: backprop, and the same loop with resets.

Every task permutes the pixels of the same digits anew, so every task is as hard as the first. A network that keeps its
plasticity reaches the same accuracy on each of them. In the end `gxd.probe` asks of each network whether it still
learns as a new one does.

    python examples/classification_stream.py    # about 25 seconds on one core
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import gxd
from gxd.lab.data import digits

# The three differ by what is attached, and by nothing else. Random resets are the control that a clever choice of units
# has to beat; on this network, with its tanh, GXD does not.
METHODS = {
    "backprop": [],
    "gxd": [{"utility": "gxd", "replacement_rate": 1e-3, "maturity": 100}],
    "random": [{"utility": "random", "replacement_rate": 1e-3, "maturity": 100}],
}
LEARNING_RATE, BATCH = 0.2, 16


def network():
    """Narrow, with tanh and a high learning rate: a setting of stress, in which plain backprop fails quickly."""
    layers = [nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, 10))


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def batches(data, task, epochs):
    """The digits with the pixels in the order of this task, in mini-batches."""
    chance = torch.Generator().manual_seed(task)
    order = torch.randperm(64, generator=chance)
    images = data.train_images[:, order] / data.full
    for _ in range(epochs):
        for index in torch.randperm(len(images), generator=chance).split(BATCH):
            yield images[index], data.train_labels[index]


def accuracy(model, data, task):
    order = torch.randperm(64, generator=torch.Generator().manual_seed(task))
    with torch.no_grad():
        return (model(data.test_images[:, order] / data.full).argmax(1) == data.test_labels).float().mean().item()


def train(model, options, data, tasks, epochs):
    """Returns the test accuracy at the end of each task, and how many units were reset."""
    optimizer = make_optimizer(model.parameters())
    methods = [gxd.method("continual_backprop", **chosen) for chosen in options]
    attached = gxd.attach(model, optimizer, *methods, example_inputs=torch.zeros(2, 64))
    reached = []
    for task in range(tasks):
        for x, y in batches(data, task, epochs):
            logits = model(x)
            attached.observe(logits, y)  # before backward(); does nothing where no method needs it
            F.cross_entropy(logits, y).backward()
            optimizer.step()  # the resets run right after it
            optimizer.zero_grad()
        reached.append(accuracy(model, data, task))
    resets = attached.total_resets
    attached.close()  # the model is an ordinary one again
    return reached, resets


def main(argv=None):
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tasks", type=int, default=60)
    options.add_argument("--epochs", type=int, default=2, help="of each task")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args(argv)
    data, tenth = digits(), max(1, args.tasks // 10)
    models, results, probes = {}, {}, {}
    print(f"test accuracy, mean of {tenth} tasks\n{'':10}{'first':>8}{'last':>8}{'resets':>8}")
    for name, chosen in METHODS.items():
        torch.manual_seed(args.seed)
        models[name] = network()
        reached, resets = train(models[name], chosen, data, args.tasks, args.epochs)
        results[name] = {"first": sum(reached[:tenth]) / tenth, "last": sum(reached[-tenth:]) / tenth, "resets": resets}
        print("{:10}{first:8.3f}{last:8.3f}{resets:8}".format(name, **results[name]), flush=True)

    # The next task is new to all of them: does each learn it as a network does that has never learned anything? A whole
    # task is what that takes: after half of it a fresh network has hardly begun, and backprop's verdict is "undecided".
    new = list(batches(data, args.tasks, args.epochs))
    for name, model in models.items():
        probes[name] = gxd.probe(model, make_optimizer, new, F.cross_entropy, steps=len(new), fresh=network)
        print(f"\n{name}\n{probes[name]}")
    return results, probes


if __name__ == "__main__":
    main()
