"""Algorithm 2 as a plain loop over plain modules, with nothing of federated/ but the order of its batches."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.data.dataset import Dataset
from secateur.interfaces import UploadContext
from secateur.seeding import derive

SIDE = 6


def pictures(rows=22, test=6, seed=3, classes=3):
    """Random pictures whose label can be learnt."""
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows + test, 1, SIDE, SIDE, generator=made)
    labels = inputs[:, 0, :2].flatten(1)[:, :classes].argmax(1)
    return Dataset("random", inputs, labels, classes, rows)


def small(seed=0, dropout=0.0, dtype=torch.float64):
    """A network with BatchNorm, and no bias before it.

    The gradient of such a bias is 0 but for rounding, and what is ranked and sent of that is another on every device.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        parts = [first, nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(dropout), nn.Flatten()]
        return nn.Sequential(*parts, nn.Linear(4 * SIDE * SIDE, 3)).to(dtype)


def alone(net, training, inner, feedback):
    """Lines 1 to 12 of Algorithm 2; `inner` compresses, `feedback` says whether errors are fed back."""
    plan, feed, seed = training.plan, training.feed, training.seed
    server = copy.deepcopy(net).train()
    optimiser = torch.optim.SGD(server.parameters(), 1.0, plan.momentum, weight_decay=plan.weight_decay)
    errors = [{name: torch.zeros_like(p) for name, p in server.named_parameters()} for _ in range(plan.users)]
    held = [inner.init(errors[0]) for _ in range(plan.users)]
    number = 0
    for epoch in range(1, plan.schedule.epochs + 1):
        optimiser.param_groups[0]["lr"] = plan.schedule.rate(epoch)
        uploads = derive(seed, "upload", epoch)
        noise = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=derive(seed, "noise", epoch))))
        steps = list(feed.batches(epoch))
        chosen = torch.randint(plan.users, (len(steps),), generator=derive(seed, "broadcast", epoch)).tolist()
        for rows, speaker in zip(steps, chosen, strict=True):
            inputs = training.data.inputs[torch.cat(rows)]
            inputs = (inputs if plan.transform is None else plan.transform(inputs, noise)).double()
            users, wholes, turnings = [], [], []
            for user, some in enumerate(inputs.split([len(each) for each in rows])):
                local = copy.deepcopy(server)
                labels = training.data.labels[rows[user]]
                cross_entropy(local(some), labels).backward()
                grads = {name: p.grad for name, p in local.named_parameters()}
                wholes.append({name: g + errors[user][name] for name, g in grads.items()})
                from_server = {name: value.detach().clone() for name, value in server.state_dict().items()}
                turnings.append(
                    UploadContext(net, from_server, type(training.feed.train)(some, labels), number, uploads)
                )
                users.append(local)
            extra = {"inside": inner.positions(wholes[speaker])} if hasattr(inner, "positions") else {}
            sent = []
            for user in range(plan.users):
                out, held[user] = inner(wholes[user], held[user], turnings[user], **extra)
                sent.append(out)
                if feedback:
                    errors[user] = {name: wholes[user][name] - out[name] for name in out}
            for name, p in server.named_parameters():
                p.grad = sum(out[name] for out in sent) / plan.users
            optimiser.step()
            _average(server, users)
            number += 1
    return server.state_dict(), errors


@torch.no_grad()
def _average(server, users):
    modules = [dict(user.named_modules()) for user in users]
    for name, module in server.named_modules():
        if isinstance(module, _BatchNorm):
            module.running_mean.copy_(sum(each[name].running_mean for each in modules) / len(users))
            module.running_var.copy_(sum(each[name].running_var for each in modules) / len(users))
            module.num_batches_tracked += 1
