"""The dead features of a sparse autoencoder: found, reset, and alive again.

The data are sparse sums of 256 directions in 64 dimensions, as activations of a network are thought to be, and the
dictionary has 256 features: one for each direction. A feature that is never among the top k gets no gradient, so it
stays dead, and a direction is left without one. `gxd.reset_units` draws its encoder weights anew, sets its decoder
weights to zero, so that it adds nothing before it has learned something (though it may take one of the k places), and
lets Adam forget it. The other autoencoder is trained on the same batches and never reset. Where there are twice as many
features as directions (`--features 512`), half of them are not needed: they die again, and resets gain little.

    python examples/sparse_autoencoder.py    # about 10 seconds on one core
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn

import gxd

DIMENSIONS, DIRECTIONS, TOP, BATCH = 64, 256, 4, 256
TRUE = F.normalize(torch.randn(DIRECTIONS, DIMENSIONS, generator=torch.Generator().manual_seed(0)), dim=1)
OFTEN = torch.arange(1, DIRECTIONS + 1) ** -0.7  # some directions are common, most are rare
OFTEN *= 4 / OFTEN.sum()  # four are active at a time, on average


class SparseAutoencoder(nn.Module):
    def __init__(self, features=DIRECTIONS):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(DIMENSIONS, features), nn.Linear(features, DIMENSIONS)
        with torch.no_grad():  # begin with unit directions, and with the decoder as the encoder's transpose
            self.encoder.weight.copy_(F.normalize(torch.randn(features, DIMENSIONS), dim=1))
            self.encoder.bias.zero_()
            self.decoder.weight.copy_(self.encoder.weight.T)

    def forward(self, x):
        active = F.relu(self.encoder(x))
        values, index = active.topk(TOP)
        features = torch.zeros_like(active).scatter(1, index, values)
        return self.decoder(features), features


def batch(number):
    chance = torch.Generator().manual_seed(1 + number)
    active = torch.rand(BATCH, DIRECTIONS, generator=chance) < OFTEN
    return (active * (0.5 + torch.rand(BATCH, DIRECTIONS, generator=chance))) @ TRUE


@torch.no_grad()
def measure(sae, numbers):
    """Which features are never active on these batches, what is unexplained, and how many directions were found."""
    x = torch.cat([batch(number) for number in numbers])
    reconstruction, features = sae(x)
    dead = (features == 0).all(0)
    unexplained = ((reconstruction - x).square().sum() / (x - x.mean(0)).square().sum()).item()
    cosines = TRUE @ F.normalize(sae.decoder.weight, dim=0)[:, ~dead]
    return dead, unexplained, int((cosines.max(1).values > 0.9).sum())


def main(argv=None):
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--every", type=int, default=150, help="steps from one reset of the dead to the next")
    options.add_argument("--features", type=int, default=DIRECTIONS)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    models = {"never reset": SparseAutoencoder(args.features)}
    models["dead are reset"] = copy.deepcopy(models["never reset"])
    resets, last, results = 0, args.steps - args.steps // 4, {}  # the youngest have a quarter of the time to learn
    for name, sae in models.items():
        optimizer = torch.optim.Adam(sae.parameters(), lr=3e-3)
        # The features are an output, too, and leave by top-k, so no tracer would touch them: we say who reads them.
        # Made before training, the plan remembers the distribution that the encoder began with.
        plan = gxd.find_units(sae, groups=[gxd.manual_group("encoder", consumers=["decoder"])])
        for number in range(args.steps):
            if name == "dead are reset" and number and number % args.every == 0 and number <= last:
                dead, *_ = measure(sae, range(number - 20, number))  # the last batches
                gxd.reset_units(sae, plan, {"encoder": dead}, optimizer=optimizer)
                resets += int(dead.sum())
            x = batch(number)
            reconstruction, _ = sae(x)
            (reconstruction - x).square().sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results[name] = measure(sae, range(10**6, 10**6 + 20))  # which no one was trained on
    print(f"{'':16}{'dead':>6}{'unexplained':>13}{'directions found':>18}")
    for name, (dead, unexplained, found) in results.items():
        print(f"{name:16}{int(dead.sum()):6}{unexplained:13.3f}{found:11} of {DIRECTIONS}")
    print(f"{resets} resets")
    return results, resets


if __name__ == "__main__":
    main()
