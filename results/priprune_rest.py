"""Where PriPrune's alpha rests on the paper's Conv-2, and how strongly each term pulls: for results/priprune.md.

Before training, and after 60 steps of SGD at rate .25 on batches of 20 pictures by 20 writers of QMNIST. By L_pri and
L_sha alone an alpha rests at lambda_pri / lambda_sha times its weight in Eq. 17, which sums to 1.

    python results/priprune_rest.py [--data FOLDER]
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import Generator, Tensor
from torch.func import functional_call, grad

from secateur import tree
from secateur.config import Federate, read
from secateur.defenses.priprune import PriPrune, preset
from secateur.defenses.withholding import whole_mask
from secateur.federated.build import load_data
from secateur.federated.client_training import binary_cross_entropy
from secateur.interfaces import Batch, LossOf, Params
from secateur.models.create import create
from secateur.seeding import derive
from secateur.studies.priprune.federations import of_first_writers

RATIOS = {"PruneFL": 15 / 2e-5, "SNIP": 1 / 2e-6, "Table A1, lowest": 5e3, "Table A1, highest": 7.5e6}
RATE, BATCH = 0.25, 20


def rests(gradient: Params) -> None:
    """Print for each lambda_pri / lambda_sha what share of the alphas rests above 1/2, and what share at most can."""
    weighty = torch.cat([value.flatten() for value in PriPrune().importance(gradient).values()])
    for name, ratio in RATIOS.items():
        share, most = float((weighty * ratio > 0.5).double().mean()), min(1.0, 2 * ratio / len(weighty))
        print(f"  {name}, lambda_pri / lambda_sha {ratio:.3g}: {share:.1%} rest above 1/2, at most {most:.1%}")


def pulls(loss: LossOf, params: Params, gradient: Params, batch: Batch, noise: Params) -> None:
    """Print L_acc's pull in the largest layer next to lambda_sha's, and how many alphas the first step raises."""
    keep = whole_mask(params, {})
    logits = {name: torch.zeros_like(params[name]) for name in keep}  # alpha 1/2
    largest = max(keep, key=lambda name: keep[name].numel())

    def slopes(rule: PriPrune, temperature: float) -> Params:
        given = loss, params, gradient, keep, tuple(batch), noise, torch.tensor(temperature)
        found: Params = grad(rule.objective)(logits, *given)
        return found

    rule = preset("femnist", "prunefl")
    for temperature in (5.0, 1.0):
        alone = slopes(replace(rule, privacy=0, sharing=0), temperature)[largest].abs().median()
        down = torch.cat([value.flatten() for value in slopes(rule, temperature).values()]) < 0
        ratio = rule.sharing / 4 / float(alone)  # d alpha / d a is 1/4 at 1/2
        words = f"L_acc's pull in {largest} is 1/{ratio:.0f} of lambda_sha's (median)"
        print(f"  temperature {temperature:g}: {words}; the first step raises {float(down.double().mean()):.1%}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", help="the folder that holds QMNIST/raw/; else $SECATEUR_DATA")
    given = parser.parse_args()
    torch.set_num_threads(1)
    whole, _ = load_data(read(Federate, None, {"data": "qmnist", "model": "conv-2", "data_folder": given.data}))
    data, rng = of_first_writers(whole, 20), Generator().manual_seed(0)
    net = create("conv-2", data.input_shape, data.classes, derive(0, "initialise", "server"))
    params = tree.params_of(net)

    def loss(params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
        return binary_cross_entropy(functional_call(net, params, (inputs,)), labels)

    for steps in (0, 60):
        for _ in range(steps):
            slopes = grad(loss)(params, *data.batch.take(torch.randperm(data.train_size, generator=rng)[:BATCH]))
            params = {name: value - RATE * slopes[name] for name, value in params.items()}
        batch = data.batch.take(torch.randperm(data.train_size, generator=rng)[:BATCH])
        noise = {name: value[0] for name, value in PriPrune().noise(params, 1, rng).items()}
        gradient = {name: value for name, value in grad(loss)(params, *batch).items() if name in noise}
        print(f"after {steps} steps:")
        rests(gradient)
        pulls(loss, params, gradient, batch, noise)


if __name__ == "__main__":
    main()
