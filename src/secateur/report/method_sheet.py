"""Sheet of one method, as `secateur list NAME` prints it: parameters with their meaning, threat model, gaps and cost.

A method's own file may set `meanings`, `threat`, `cost` and `gap` in its decorator; others have those of this module.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from secateur.defenses import AGAINST_NOTHING
from secateur.evaluation.attack_strength import AGAINST_SUBMODELS

MEANINGS = {  # by parameter; `kind.parameter` or `method.parameter` comes first where the same name differs
    "a": "offline: share of P_in that follows P_out, as P_in is unknown",
    "accountant": "how epsilon is counted: rdp or prv",
    "accuracy": "weight lambda_acc of the classification loss",
    "adaptive": "how the attacker adapts to a defense: none, support, layer, reapply, mask, loss or fill",
    "alpha": "share of a layer's kept weights that is pruned and grown again",
    "adv.alpha": "weight of the surrogate attack's gain in the classifier's loss",
    "priprune.alpha": "probability of withholding a weight, at the start",
    "attack_learning_rate": "learning rate of the surrogate attack",
    "attack_steps": "steps of the surrogate attack for each step of the classifier",
    "batch": "candidates that are decided together",
    "batch_size": "examples a training step",
    "batchnorm": "weight a_BN of the distance to BatchNorm's statistics",
    "beta": "how fast the defense is applied more rarely: with the chance 1 / (1 + beta t) in round t",
    "precode.beta": "weight of the bottleneck's divergence in training",
    "bins": "rows of the imprint block; more separate more pictures",
    "box": "true: pictures are clamped to the valid range of pixels",
    "candidates": "random policies that a search draws",
    "centre": "the attacker's estimate of the mean of its measurement",
    "chosen": "true: the attacked user broadcasts the positions; false: another user does",
    "classes": "number of classes",
    "constant": "seconds of a round that do not depend on the kept weights; used with seconds",
    "coolest": "lowest temperature",
    "cooling": "factor of the temperature, each turn",
    "coupling": "layer-wise: a layer's inputs are the outputs before it; independent: both are drawn",
    "degrees": "step of the rotations, in degrees",
    "delta": "delta of the guarantee; null: 1 / number of examples",
    "dp.delta": "delta of the guarantee",
    "deviation": "the attacker's estimate of the deviation of its measurement; null: by the size of a picture",
    "distance": "how gradients are compared: cosine, euclidean or others of the source",
    "divergence": "true: the attacked gradient is of the loss with the divergence",
    "download": "true: the data are downloaded if they are missing",
    "dropout": "dropout rate of the attack's network",
    "early_stopping": "true: the attack's network keeps its best epoch on held-out shadow rows",
    "engine": "how gradients are computed: auto, or a name of attacks/inversion/engines",
    "epochs": "epochs of the attack's network",
    "every": "rounds between two adjustments of the mask",
    "first_batchnorm": "factor of the first BatchNorm layer in batchnorm",
    "fixed": "true: the first mask is kept",
    "flips": "disturbed copies of a row of a table",
    "folder": "folder of the files; null: $SECATEUR_DATA or the cache",
    "follows": "true: leaves out entries that the client did not send in its last update",
    "form": "paper: the largest probability; code: the true label's",
    "fraction": "share of kept weights that become candidates at first",
    "gamma": "how many times the ratio of another example must be exceeded",
    "generated": "non-members that the attack makes and asks about",
    "generator": "module:function of the attacker's (z, y) -> pictures; null: one trained on public rows",
    "group": "weight a_group of the distance to the mean of the restarts",
    "groups": "number of groups of clients",
    "pruner.groups": "per-conv: each layer by itself; coupled: channels that a shortcut joins go together",
    "halving": "rounds after which the share of candidates is half",
    "hidden": "widths of the surrogate attack's hidden layers",
    "hold": "what stops the return of weights: rate (an exact sparsity) or time (PruneFL's rule)",
    "input_shape": "shape of one example",
    "iterations": "steps of the optimisation",
    "prunefl.iterations": "steps of the initial pruning at one client",
    "k": "share of entries that every user sends",
    "k1": "share of the largest entries that are dropped; dgp: null is .05",
    "k2": "share of the smallest entries that are dropped; null is .75",
    "keep": "share of entries that are sent",
    "kl": "weight of the divergence of z from N(0, 1)",
    "l1": "weight of the sum of |gamma| in the training of the original",
    "l2": "weight a_l2 of the squared norm of the pictures",
    "labels": "how labels are known: idlg (inferred), joint (optimised with the picture), or given",
    "largest": "share of the rate that goes to the largest gradients",
    "layer": "layer that adaptive=layer leaves out; null: the one with the most zeros",
    "soteria.layer": "layer that is defended; null: the last fully connected one",
    "learning_rate": "step size",
    "learns": "turn: alpha learns once a turn; step: at every batch",
    "magnitudes": "true: reads the squared gradients that PruneFL's clients send, of withheld weights too",
    "mask": "full: a filter with its bias and BatchNorm; conv-only: the weight alone",
    "max_grad_norm": "norm to which each example's gradient is clipped",
    "measurement": "what the imprint block measures: randn or dct",
    "mode": "auto, online (models with the example too) or offline",
    "int8.mode": "static: all layers, ranges from training rows; dynamic: linear layers, scaled row by row",
    "momentum": "momentum of the attack's training",
    "natural": "weight a_N of the natural prior; above 0 pictures are searched in coordinates that fall as 1/f",
    "noise": "deviation of the noise on pixels in a step, times the learning rate",
    "label-only.noise": "deviation of the noise on columns that are no bits",
    "noise_multiplier": "deviation of the noise, in units of max_grad_norm",
    "normalise": "layer: every layer has its share of the privacy loss; global: all layers together",
    "of": "the rate is a share of all weights, or of the kept ones",
    "offline": "score of the offline mode: cdf (the paper) or density (its code)",
    "optimizer": "adam or lbfgs",
    "order": "order of the norm",
    "p": "ratio k1 / k2; null: 1/15 if only total is set",
    "patience": "epochs without improvement before training stops",
    "phi": "share of entries, of highest Fisher information, that get noise",
    "policies": "policies as 3-1-7, several separated by /; or search",
    "population": "most rows of the attacker's population",
    "ggl.population": "candidates in a round of the search",
    "privacy": "weight lambda_pri of the privacy loss",
    "pseudo": "true: weights are withheld from the server only; false: they are pruned",
    "queries": "2: the mirrored image is asked about too",
    "rate": "share of the weights that is pruned",
    "defense.rate": "share of the weights that is withheld",
    "label-only.rate": "chance that a bit flips",
    "soteria.rate": "share of the layer's columns that become zero",
    "reading": "code: all clients train one group's block; paper: each client draws a group",
    "registers": "true: restarts are aligned to their mean before the distance to it is taken",
    "release": "rounds after which an entry that was held back is sent once; null: never",
    "layerwise.share": "share of the gradient's log-likelihood in the probabilities of positions",
    "layerwise.precision": "error of outputs and gradients, relative to their root mean square",
    "layerwise.hardening": "last factor of the variances that come from unknown positions of max-pooling",
    "smoothing": "deviation of the noise on pixels at which the objective is taken; none in the last fifth",
    "softness": "share of the mean |g| that stands for the eps of Adam, whose own leaves a search no slope",
    "unrolls": "true: trials take the client's own steps; false: its change is taken for one step of SGD",
    "restarts": "trials of each target, from different starts",
    "retries": "new starts of a trial that diverged",
    "rho": "share of small entries that become zero",
    "rotations": "rotations to each side",
    "rounds": "rounds of scoring and pruning",
    "inversion.rounds": "last rounds of a client that are joined, as if all were of the same examples",
    "rule": "logistic: a regression on the answers; share: the share of right ones",
    "samples": "examples of the client that makes the first mask",
    "samples_per_class": "examples of each class for the score",
    "scale": "factor a_G of the distance of gradients",
    "schedule": "how the learning rate changes over the iterations",
    "scope": "layer: a share of every layer; global: of the whole network",
    "search": "cma (evolution) or gradient (Adam)",
    "seconds": "seconds of a round for a weight of every layer; empty: measured",
    "sharing": "weight lambda_sha of the loss that lets weights be sent; small networks need more",
    "sigma": "deviation of the noise",
    "ggl.sigma": "initial step size of the evolution",
    "sign": "true: steps follow the sign of the gradient",
    "size": "variables of the bottleneck",
    "squares": "all: clients send the squares of all gradients; shared: of shared weights only",
    "step": "learning rate of the masks",
    "strength": "weight lambda of the divergence of ranked answers",
    "outpost.strength": "deviation of the noise, times the risk of the tensor",
    "student": "network that learns: the name of a model, or module:function",
    "target": "what is matched: the update, or its unpruned entries",
    "temperature": "of the softmax; higher answers are softer",
    "priprune.temperature": "of a client's first mask; lower masks are harder",
    "threshold": "how the threshold is learnt: mean, tuned, or class",
    "rob.threshold": "share of the largest difference below which a bin counts as empty",
    "ats.threshold": "least accuracy score of a policy in a search; null: the median",
    "total": "k1 + k2; null: .8 if only p is set",
    "translations": "largest shift, in pixels",
    "tv": "weight a_TV of the total variation; ig chooses it on public rows unless it is set",
    "tv_average": "true: half the sum of the mean differences, not their sum",
    "validation": "share of a client's data that says when to stop",
    "variance": "per-example, fixed (pooled), or auto: fixed below 64 models",
    "warm_up": "epochs in which the surrogate attack is trained first",
    "weight": "share of the original's answers in the loss; the labels have the rest",
    "weight_decay": "weight decay of the attack's training",
}
RANKS = "no model is trained; 1 query an example; seconds. Shadow models, if there are some, set thresholds"
TRAINED = "shadow models are trained as the victim was (5 by default), which takes most of the time"
REFERENCES = (
    "at least 2 shadow or 4 in-out models are trained as the victim was (5 by default, 8 in-out for weights that you "
    "bring), which takes most of the time; 1 query an example of each model"
)
LEARNS = f"{TRAINED}; 1 query an example; then the attack's own network, seconds to minutes, an hour for 200 000 rows"
COSTS = {
    "blindmi": "no model is trained; 1 query an example, and one for each generated row; seconds",
    "correctness": "no model is trained; 1 query an example; seconds",
    "label-only": f"{TRAINED}; 13 queries an image or 21 a table's row by default, of every model; seconds to minutes",
    "lira": REFERENCES,
    "rmia": f"{REFERENCES}, and of its population",
    "samia": f"{TRAINED}; 11 queries an example; then a transformer of its own, seconds to minutes",
    "nn": LEARNS,
    "nn-cls": f"{LEARNS}; one network a class",
    "top3-nn": LEARNS,
    "yeom": f"{TRAINED}; 1 query an example; seconds",
    "r-gap": "no iterations: every layer is solved once, in float64; seconds to minutes a picture",
    "rob": "no iterations: the pictures are read off one update; seconds",
    "ggl": "500 rounds of 50 candidates; half a minute a round for 20 pictures on a CPU, and the generator's training",
    "adv": "a second network is trained beside the fine-tuning, and before it for its warm-up",
    "ats": "one transform of each picture; a search of policies trains nothing, but attacks every candidate",
    "basic": "none: fewer epochs, if early stopping ends the fine-tuning",
    "none": "none",
    "soteria": "gradients of every feature of one layer, for each update",
    "precode": "one more layer in every training step",
    "mixed-distil": "the unpruned model is asked about every batch of the fine-tuning; no model is trained beside",
    "relaxed-loss": "the unpruned model is asked about the validation rows once; no model is trained beside",
    "ppb": "one sort of each batch's answers; no model is trained beside",
    "priprune": "masks of all weights are trained beside them, in every turn of a client",
    "distil": "the training of the student, with the original asked about every batch; no fine-tuning",
    "int8": "no training; one pass of training rows through the network; seconds",
    "pruner.synflow": "100 rounds of one pass without data, then fine-tuning for half of the training's epochs",
    "slimming": "the original is trained once more with the term, then fine-tuned for half of the training's epochs",
    "feddst": "each client sorts its weights every few rounds; the rounds cost as before",
    "prunefl": "clients add up squared gradients in each step, and one client trains alone before round 1",
    "local": "no rounds: every client trains alone",
}
PRIVATE = "gradients of single examples: about twice the time of a step; nothing else is trained"
THREATS = {
    "snip": "sees the weights and members' gradients, which the mask may reveal",
    "grasp": "sees the weights and members' gradients, which the mask may reveal",
    "distil": "sees the original's answers for its members; the student is trained on the members too",
    "int8": "sees the weights; static ranges come from the activations of members",
    "torch-pruning": "sees the weights alone; fine-tuning uses the members again",
    "prunefl": "sees squared gradients that all clients send, and one client's data for the first mask",
    "feddst": "sees each client's weights and the gradient of its last batch",
}
FINE_TUNED = "an original that is shared too, which was trained without it; updates of a client"
SENT = "answers of the trained model, and what the server joins over many rounds"
ATTACK_GAP = "a low score says nothing of stronger attackers: compare lira and rmia with in-out models"
GAPS = {  # kinds, `acts_on` of defenses, and methods: what a method does not protect against, or does not show
    "attack": ATTACK_GAP,
    "inversion": "a bad picture says nothing of more iterations, of public pictures (ggl) or of an active server (rob)",
    "pruner": "it protects nothing by itself: fine-tuning uses the members again, and pruned models may leak more",
    "base-pruning": "it protects nothing by itself: kept weights and, of some, gradients are sent",
    "submodel": "the server's own model, pictures from a client's update, and clients that train the whole model",
    "upload": SENT,
    "residual": f"{SENT}; it brings back what the upload held back",
    "inputs": "the transformed picture itself, which an attack may find; answers of the trained model",
    "model": "an attacker who leaves its layer out; answers of the trained model",
    "client": f"{SENT}; a server that remembers which weights a client sent last",
    "recipe": FINE_TUNED,
    "loss": FINE_TUNED,
    "fine-tuning": FINE_TUNED,
    "training": "people with several examples, as epsilon counts one example; masks made from members' gradients",
    "none": "anything",
    "basic": "attackers with shadow models: it stops overfitting and hides nothing",
    "dp": "people with several examples, as epsilon counts one; noise whose seed others know",
    "dp-sgd": "the original's training, which its epsilon does not cover; people with several examples",
    "noise": "a server that averages repeated batches; there is no epsilon",
    "correctness": "a model that is right about everything gives it nothing to rank; others still may",
    "yeom": f"it needs known members; {ATTACK_GAP}",
    "r-gap": "it needs one image, an exact update and a plain chain of layers; other attacks do not",
}
STRONGEST = {  # of kinds; a defense names its own (`strongest` of its decorator)
    "attack": f"among those here, {AGAINST_NOTHING}",
    "inversion": "an active server (rob); among passive ones, an attack that knows of the defense (adaptive=...)",
    "pruner": f"{AGAINST_NOTHING}, pruned in the same way",
    "base-pruning": "sgi:adaptive=support:follows=true, which compares sent entries and remembers a client's last ones",
    "submodel": AGAINST_SUBMODELS,
}
SUBMODEL = "an honest-but-curious server sees each client's part of the model; a client, the part that it trains"


def describe_method(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the sheet of a method says beside its text."""
    facts = {"meanings": describe_meanings, "threat": describe_threat, "gap": describe_gap, "cost": describe_cost}
    strongest = row.get("strongest") or STRONGEST.get(row["kind"])
    return {name: describe(row) for name, describe in facts.items()} | {"strongest": strongest}


def describe_meanings(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the meaning of each parameter of a method; empty where nobody wrote one."""
    known = MEANINGS | row.get("meanings", {})
    names = {name: (f"{row['name']}.{name}", f"{row['kind']}.{name}", name) for name in row["defaults"]}
    return {name: next((known[key] for key in keys if key in known), "") for name, keys in names.items()}


def describe_threat(row: Mapping[str, Any]) -> str | None:
    """Return what an attacker sees and needs, or what a defense or a compressor sees; None for data and models."""
    kind = row["kind"]
    if kind in ("attack", "inversion"):
        return f"the attacker sees {describe_needs(row)}" if kind == "attack" else describe_needs(row)
    if kind == "defense":
        return f"it acts on the {row['acts_on']}"
    if kind in ("pruner", "base-pruning"):
        again = "; fine-tuning uses the members again" if kind == "pruner" else ""
        return str(row.get("threat") or _find(THREATS, row) or f"sees the weights alone{again}")
    return SUBMODEL if kind == "submodel" else None


def describe_needs(row: Mapping[str, Any]) -> str:
    """Return the outputs that an attacker sees, and the knowledge that it needs."""
    if "threat" in row:
        return str(row["threat"])
    known = {"none": "", "needed": "; shadow models of its own", "for a threshold": "; shadow models set its threshold"}
    shadows = known.get(row["shadows"], f"; models: {row['shadows']}")
    return f"the model's {row['sees']}{shadows}"


def describe_cost(row: Mapping[str, Any]) -> str:
    """Return what a method costs, in words: the models that it trains, its queries, and the order of time."""
    needs = f"; needs the extra {row['requires'][1]}" if "requires" in row else ""
    return str(row.get("cost") or _find(COSTS, row) or _describe_common(row)) + needs


def describe_gap(row: Mapping[str, Any]) -> str | None:
    """Return what a method does not protect against, or what an attack does not show; None for data and models."""
    named = row["name"] if row["kind"] in ("attack", "inversion", "defense") else row["kind"]  # pruners share names
    return row.get("gap") or GAPS.get(named) or GAPS.get(row.get("acts_on", row["kind"]))


def _find(texts: Mapping[str, str], row: Mapping[str, Any]) -> str | None:
    """Return the text of a method; of its kind first, as some names are of several kinds."""
    return texts.get(f"{row['kind']}.{row['name']}") or texts.get(row["name"])


def _describe_common(row: Mapping[str, Any]) -> str:
    """Return the cost that methods of a kind share."""
    kind, defaults = row["kind"], row["defaults"]
    if kind == "attack":
        return RANKS if row["shadows"] in ("none", "for a threshold") else f"{TRAINED}; every example is asked"
    if kind == "inversion":
        steps, restarts = defaults.get("iterations", "its"), defaults.get("restarts", 1)
        trials = f"{steps} steps, each a gradient of the network, for each of {restarts} restarts a target"
        return f"{trials}; nothing is trained; minutes to hours on a CPU"
    if kind == "defense":
        return PRIVATE if "noise_multiplier" in defaults else "one pass over an update's entries; nothing is trained"
    if kind == "pruner":
        return "one score of all weights, then the fine-tuning, by default half of the training's epochs"
    if kind == "base-pruning":
        once = "one mask before round 1" if row["cycles"] == "one shot" else "a new mask every few rounds"
        return f"{once}; fewer bytes and weights in every round"
    if kind == "submodel":
        return "a round trains and sends only a share of the channels, so it costs less than FedAvg's"
    if kind == "model":
        return f"{row['parameters']:,} parameters"
    if kind == "dataset":
        embedded = row["source"] == "embedded"
        return "none: the data come with scikit-learn" if embedded else f"a download from {row['source']}"
    return f"by --scale {', '.join(row['scales'])}: minutes on a CPU, or hours on a GPU"


def print_sheet(row: Mapping[str, Any]) -> None:
    """Print one method: what it does, its parameters, its threat model, its gaps and its cost."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    paper = "" if row["paper"] == "-" else f", {row['paper']}"
    console.print(f"{row['name']} ({row['kind']}{paper})", style="bold")
    console.print(re.sub(r"(?<!\n)\n(?![\n-])", " ", row["text"]), markup=False)
    table = Table(box=None, header_style="bold", title="Parameters", title_justify="left")
    for heading in ("name", "default", "meaning"):
        table.add_column(heading, no_wrap=heading == "name")
    for name, meaning in describe_meanings(row).items():
        table.add_row(name, write_default(row["defaults"][name]), meaning)
    console.print(table if row["defaults"] else "Parameters: none.")
    if (threat := describe_threat(row)) is not None:
        console.print(f"Threat model: {threat}.")
    if (strongest := describe_method(row)["strongest"]) is not None:
        console.print(f"Strongest attacker known: {strongest}.")
    if (gap := describe_gap(row)) is not None:
        console.print(f"Not covered: {gap}.")
    console.print(f"Cost: {describe_cost(row)}.")


def write_default(value: Any) -> str:
    """Return a default as it is written in a run file."""
    return "(required)" if value is dataclasses.MISSING else json.dumps(value, default=str)
