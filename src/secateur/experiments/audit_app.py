"""The job of `secateur audit-app`: an existing Flower app runs in simulation, and its clients' updates are attacked.

The app stays as it is (federated/flower/app_run.py). The attacker is its server, which hands out the app: it knows the
network, the optimiser and the sizes of the steps. The examples that a probe saw in the clients score the attacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from secateur.catalogue import Choice, Defense
from secateur.config import AuditApp, dump
from secateur.defenses.error_feedback import upload_of
from secateur.errors import WrongInput, require
from secateur.evaluation import gallery
from secateur.evaluation.calibration import is_open, list_weights
from secateur.evaluation.client import caution
from secateur.evaluation.reconstruction import NOT_RUN, attack_labels, with_extras
from secateur.evaluation.setup import device_of
from secateur.federated.attacks.inversion import InversionObserver
from secateur.federated.attacks.knowledge import is_active
from secateur.federated.attacks.observer import RoundView
from secateur.federated.attacks.schedule import AttackSchedule
from secateur.federated.checkpoint import FederationLog
from secateur.federated.result_rows import settings_of
from secateur.interfaces import Knowledge
from secateur.progress import Advance, progress
from secateur.report import page_afterwards
from secateur.runs.artifacts import Result
from secateur.runs.folder import open_run
from secateur.runs.rows import Row

if TYPE_CHECKING:  # Flower is an extra
    from secateur.federated.flower.app_run import AppRound
    from secateur.federated.flower.app_turn import AppTurn
    from secateur.federated.flower.project import AppProject

EQUAL = 1e-5  # relative difference of two updates that are the same, as float32 rounds
ALIKE = 1e-2  # of an imitation that is good enough for an attack


def run_audit_app(config: AuditApp, out: Path) -> list[Row]:
    """Run the app under every defense, for every seed, and attack its updates, into the folder `out`."""
    project, device = check_audit_app(config)
    torch.set_num_threads(config.threads)
    opened = open_run(out, "audit-app", dump(config), device=str(device), seeds=config.seeds)
    with page_afterwards(out), opened as run:
        for seed, defense in product(config.seeds, config.defense):
            depends = project.key | attack_key(config) | {"seed": seed, "defense": str(defense)}
            result = run.stage("app", depends, partial(measure, config, project, defense, seed, device))
            log = FederationLog()
            log.load(result.data)
            gallery.save(run.folder / "pictures", log.figures)
            run.show(log.figures)
            run.add(log.rows)
    return run.rows


def plan(config: AuditApp) -> list[str]:
    """Describe the steps of the job, a line each; refuse the configurations that the job refuses."""
    project, _ = check_audit_app(config)
    settings = " ".join(f"{name}={value}" for name, value in project.config.items())
    seeds, rounds = (", ".join(map(str, values)) for values in (config.seeds, config.attack_at))
    return [
        f"{project.name} in {project.folder}, seeds {seeds}; for each seed:",
        f"  run {project.server} and {project.client} with {config.clients} clients in simulation: {settings}",
        f"  once with each defense: {', '.join(map(str, config.defense))}",
        f"  attack the updates of clients 0 to {config.attack_clients - 1} in round {rounds}",
        *(f"  attack with {attack}: {attack.method.info['threat']}" for attack in list_attacks(config)),
    ]


def check_audit_app(config: AuditApp) -> tuple[AppProject, torch.device]:
    """Return the app and the device of the attacks; refuse before any work what cannot be audited."""
    require("flwr", "flower")
    from secateur.federated.flower.mod import check
    from secateur.federated.flower.project import read_project

    for defense in config.defense:
        upload = upload_of(defense)
        if upload is not None:
            check(upload)
        elif str(defense) != "none":
            raise WrongInput("defense", f"{defense} does not act on a sent update; use one such as dgp or noise")
    for attack in config.attacks:
        if is_active(attack):
            raise WrongInput("attack", f"{attack.name} changes the model that the server sends; use a passive attack")
    return read_project(config.app, config.run_config), device_of(config)


def attack_key(config: AuditApp) -> dict[str, Any]:
    """Return the settings, beside the app and its defense, that the results depend on."""
    names = ("clients", "attack_at", "attack_clients", "labels", "mean", "std", "images", "threads")
    return {"attack": list(map(str, list_attacks(config)))} | {name: getattr(config, name) for name in names}


def list_attacks(config: AuditApp) -> list[Choice]:
    """Return the attacks; one whose weight of total variation is open is mounted with every weight."""
    return [one for attack in config.attacks for one in (list_weights(attack) if is_open(attack) else [attack])]


def measure(config: AuditApp, project: AppProject, defense: Defense, seed: int, device: torch.device) -> Result:
    """Run the app once under a defense, attack its updates, and return the rows and figures."""
    from secateur.federated.flower.app_run import run_app

    title = f"{project.name}, {defense}, seed {seed}"
    with progress(title, unit="rounds") as advance:
        watched = (range(config.attack_clients), config.watched)
        tell = partial(_tell, advance, title)
        seen = run_app(project, config.clients, upload_of(defense), seed, *watched, tell)
    if not any(turn.round in config.attack_at for turn in seen.turns):
        rounds = f"there are {max(seen.rounds)} rounds, and clients 0 to {config.attack_clients - 1} are attacked"
        raise WrongInput("attack_at", f"no attacked client took part in round {config.attack_at}; {rounds}")
    turns = sorted(seen.turns, key=lambda turn: (turn.round, turn.training.client))
    network = type(turns[0].training.nets[0]).__name__ if turns[0].training.nets else "network"
    extra = {"app": True, "base_pruning": "none", "broadcast": "whole", "clients": config.clients, "view": "update"}
    extra |= {"settings": settings_of(*defense.parts)}
    extra |= {"local_batch": turns[0].training.steps[0].size} if turns[0].training.steps else {}
    labels = {"model": network, "dataset": project.name, "seed": seed, "defense": str(defense), "pruner": "none"}
    labels |= {"extra": extra}
    log = FederationLog()
    log.rows += list(list_rounds(labels, seen.rounds))
    log.rows += list(describe_clients(labels, turns, len(getattr(project.load_client(), "_mods", ()))))
    attack_turns(config, turns, labels, defense, device, log)
    return Result({}, log.to_plain())


def _tell(advance: Advance, title: str, text: str) -> None:
    advance(1, f"{title}: {text}")


def list_rounds(labels: dict[str, Any], rounds: Mapping[int, AppRound]) -> Iterator[Row]:
    """Yield the rows of the app's rounds: the accuracy that clients report, bytes so far, lost clients."""
    up = down = 0
    for number, record in sorted(rounds.items()):
        up, down = up + record.up, down + record.down
        at = with_extras(labels, round=number, client=None)
        if record.accuracy is not None:
            who = "clients, by their examples" if record.central is None else "server"
            note = f"reported by the app's {who}"
            yield Row(**at, metric="test_accuracy", value=record.accuracy, note=note)
        for metric, size in (("bytes_up", up), ("bytes_down", down)):
            yield Row(**at, metric=metric, value=size, note="of all clients since the first round")
        if record.errors:
            note = f"clients failed: {record.errors[0][:300]}"
            yield Row(**at, metric="lost_clients", value=len(record.errors), note=note)


def describe_clients(labels: dict[str, Any], turns: Sequence[AppTurn], mods: int) -> Iterator[Row]:
    """Yield rows on the clients' training, on what is sent of it, and on how well the attacker imitates it.

    Args:
        labels: of the rows.
        turns: the attacked turns.
        mods: the number of mods of the client app.
    """
    from secateur.federated.flower.app_turn import describe_training

    at = with_extras(labels, round=turns[0].round, client=None)
    steps = len(turns[0].training.rates)
    yield Row(**at, metric="local_steps", value=steps, note=describe_training(turns[0].training))
    try:
        change, cosine, ratio = max(turn.compare() for turn in turns)
        note = describe_change(change, cosine, ratio, str(labels["defense"]), mods)
        yield Row(**at, metric="update_change", value=change, note=note)
        error = max(turn.imitate() for turn in turns)
    except WrongInput as refusal:
        yield Row(**at, metric="imitation_error", value=None, note=f"It cannot be imitated: {refusal.message}.")
        return
    note = f"An attacker who repeats a client's training gets its update to a relative error of {error:.1g}."
    doubt = " The app does more than its optimiser and loss say (dropout, clipping): attacks on it are hampered."
    yield Row(**at, metric="imitation_error", value=error, note=note + (doubt if error > ALIKE else ""))


def describe_change(change: float, cosine: float, ratio: float, defense: str, mods: int) -> str:
    """Return in words what is left of a client's update when it is sent."""
    filters = f"the app's {mods} mod{'s' if mods > 1 else ''}" if mods else "the app's code after training"
    filters = filters if defense == "none" else defense
    if change > EQUAL:
        numbers = f"cosine {cosine:.3f} with the trained update, {ratio:.3g} of its norm"
        return f"What is sent is changed by {filters}: {numbers}."
    if defense == "none" and not mods:
        return "What is sent is the trained model, unchanged."
    return f"What is sent is the trained model: {filters} changes nothing. A filter that does nothing protects nothing."


def attack_turns(
    config: AuditApp,
    turns: Sequence[AppTurn],
    labels: dict[str, Any],
    defense: Defense,
    device: torch.device,
    log: FederationLog,
) -> None:
    """Attack turns, those of a round together where their clients did alike; add rows and figures to the log.

    An attack with `rounds` joins a client's earlier turns too, if the client did alike in them.
    """
    attacks = list_attacks(config)
    groups: dict[Any, list[tuple[AppTurn, Knowledge]]] = {}
    for turn in turns:
        try:
            known = turn.know(config.mean, config.std, device)
        except WrongInput as error:
            if turn.round in config.attack_at:
                log.rows += report_refusal(attacks, with_extras(labels, round=turn.round), error, turn.training.client)
            continue
        alike = (known.batch_size, known.local_batch, known.local_epochs, known.optimiser, known.learning_rate)
        groups.setdefault(alike, []).append((turn, known))
    for number, members in product(sorted(config.attack_at), groups.values()):
        knowledge = [known for turn, known in members if turn.round == number]
        if not knowledge:
            continue
        views = [turn.show(device) for turn, _ in members if turn.round <= number]
        mounted = []
        for attack in attacks:
            try:
                attack.make().check(knowledge[0], views[-1].view)
                mounted.append(attack)
            except WrongInput as error:
                log.rows += report_refusal([attack], with_extras(labels, round=number), error)
        if mounted:
            orders, kept = (
                AttackSchedule(at=(number,), who="all"),
                {view.round: set(range(config.clients)) for view in views},
            )
            options: dict[str, Any] = {"tells_labels": config.labels == "oracle", "images": config.images}
            options |= {"at_once": 1, "caution": caution(defense, mounted)}
            observer = InversionObserver(mounted, knowledge[0], labels, log, orders, kept, **options)
            for shown in sorted(kept):
                seen = [view for view in views if view.round == shown]
                observer(RoundView(shown, seen[0].view.sent, {}, seen, lambda net, state: []))
            observer.finish()


def report_refusal(
    attacks: Sequence[Choice], labels: dict[str, Any], error: WrongInput, client: int | None = None
) -> list[Row]:
    """Return rows that say why updates were not attacked."""
    more = {"client": client, "target": None, "trial": None, "item": None, "knows": "nothing, as it was not run"}
    rows = []
    for attack in attacks:
        extra = labels["extra"] | more | {"threat": attack.method.info["threat"], "attacked": 1}
        at = attack_labels(labels, extra, attack)
        note = f"{NOT_RUN}{error.message}"
        rows += [Row(**at, metric=metric, value=None, note=note) for metric in ("psnr", "recognisable")]
    return rows
