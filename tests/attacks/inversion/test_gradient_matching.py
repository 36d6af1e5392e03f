"""The loop: restarts and targets on one axis, divergence, resuming, several rounds, local steps, statistics."""

from dataclasses import replace

import pytest
import scenes
import torch
from torch import nn

from secateur import catalogue
from secateur.attacks.inversion import optimisation
from secateur.attacks.inversion.gradient_matching import GradientMatching, aim_at
from secateur.errors import WrongInput
from secateur.interfaces import Gradient, ServerView
from secateur.seeding import derive

QUICK = GradientMatching(iterations=60, sign=True, schedule="steps", engine="plain")
BRIEF = replace(QUICK, iterations=15)  # where two runs are compared, or what is kept of one


def run(attack, targets, known, seed=0, watch=None):
    found = dict(attack.reconstruct(targets, known, [scenes.rng(seed)] * len(targets), watch or scenes.Diary()))
    return [found[i] for i in range(len(targets))]


def scene(count=3, size=1, **network):
    net = scenes.network(**network)
    truths = [scenes.batch(i, size) for i in range(count)]
    return net, truths, [[scenes.view(net, truth)] for truth in truths], scenes.knowledge(net, batch_size=size)


def test_better_than_the_start_and_the_curve_falls():
    _, truths, targets, known = scene()
    watch = scenes.Diary()
    for found, truth in zip(run(QUICK, targets, known, watch=watch), truths, strict=True):
        assert found.loss < found.curve[0][1] / 5
        assert [i for i, _ in found.curve] == list(range(61)) and found.curve[-1][1] == found.loss
        assert torch.equal(found.batch.labels, truth.labels) and found.trial == 0 and found.diverged == 0
        assert found.batch.inputs.abs().max() <= 1, "inside the box"
    assert watch.iterations == 60 and len(watch.pictures[-1]) == 3


def test_the_loss_is_that_of_the_returned_picture():
    net, _, targets, known = scene(1)
    (found,) = run(QUICK, targets, known)
    mine = scenes.view(net, found.batch).update.values
    sent = targets[0][0].update.values
    dot, a, b = (sum((x[n] * y[n]).sum() for n in sent) for x, y in ((mine, sent), (mine, mine), (sent, sent)))
    assert found.loss == pytest.approx(float(1 - dot / (a * b).sqrt()), abs=1e-9)


def test_the_restart_with_the_lowest_matching_loss_is_taken():
    _, _, targets, known = scene(2)
    watch = scenes.Diary()
    found = run(replace(BRIEF, restarts=3), targets, known, watch=watch)
    losses = watch.states[-1]["0/matching"].view(2, 3)
    assert [one.trial for one in found] == losses.argmin(1).tolist()
    assert [one.loss for one in found] == losses.min(1).values.tolist()


@pytest.mark.parametrize("change", [{}, {"noise": 0.1, "restarts": 2, "group": 0.01, "sign": False}])
def test_targets_together_are_what_they_are_one_by_one(change):
    _, _, targets, known = scene()
    attack = replace(BRIEF, **change)
    together = run(attack, targets, known)
    rng = scenes.rng()
    for i, target in enumerate(targets):
        ((_, alone),) = attack.reconstruct([target], known, [rng], scenes.Diary())
        torch.testing.assert_close(alone.batch.inputs, together[i].batch.inputs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("optimizer, iterations", [("adam", 10), ("lbfgs", 6)])
def test_a_resumed_attack_ends_bit_for_bit_as_one_that_was_not_interrupted(optimizer, iterations, monkeypatch):
    monkeypatch.setattr(optimisation, "SAVE_SECONDS", 0)
    monkeypatch.setattr(optimisation, "CHUNK", 2)
    _, _, targets, known = scene(2)
    settings = {"labels": "joint", "restarts": 2, "noise": 0.1, "group": 0.01}
    attack = replace(QUICK, iterations=iterations, optimizer=optimizer, **settings)
    watch = scenes.Diary()
    whole = run(attack, targets, known, watch=watch)
    again = scenes.Diary(watch.states[1])
    resumed = run(attack, targets, known, watch=again)
    assert again.iterations == iterations - 4, "the first four were done"
    for a, b in zip(whole, resumed, strict=True):
        assert torch.equal(a.batch.inputs, b.batch.inputs) and a.curve == b.curve and a.loss == b.loss


def test_where_memory_runs_out_half_the_targets_go_on(monkeypatch):
    _, _, targets, known = scene()
    attack = replace(BRIEF, restarts=2)
    whole = run(attack, targets, known)
    step = optimisation.Trials.step

    def short_of_memory(trials, state):
        if trials.size > 2 and int(state["clock"].max()) >= 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(trials, state)

    monkeypatch.setattr(optimisation.Trials, "step", short_of_memory)
    watch = scenes.Diary()
    for a, b in zip(whole, run(attack, targets, known, watch=watch), strict=True):
        assert torch.equal(a.batch.inputs, b.batch.inputs) and a.curve == b.curve
    assert (watch.states[-1]["0/clock"] == 15).all()


class Bomb(nn.Module):
    """Gives no number for pictures that are dark on the whole."""

    def forward(self, x):
        return torch.where(x.mean() < -0.1, torch.nan, 1.0) * x


def test_trials_that_diverge_begin_again_and_are_counted(monkeypatch):
    monkeypatch.setattr(optimisation, "CHUNK", 5)
    net = nn.Sequential(Bomb(), *scenes.network()).eval()
    truth = scenes.batch(3)
    assert truth.inputs.mean() > 0
    target, known = [scenes.view(net, truth)], scenes.knowledge(net)
    attack = replace(QUICK, restarts=6, iterations=20, box=False)
    watch = scenes.Diary()
    (found,) = run(attack, [target], known, watch=watch)
    assert found.diverged == int(watch.states[-1]["0/attempt"].sum()) > 0
    assert found.loss < 1 and found.batch.inputs.isfinite().all()
    assert watch.iterations > 20, "whoever began again had all its iterations"


def test_an_explosion_is_a_loss_far_above_the_first():
    """Of three restarts the first exploded, the last did too and has no retry left: it rests."""
    _, _, targets, known = scene(1)
    attack = replace(QUICK, restarts=3, retries=1)
    trials = attack.trials([aim_at(attack, targets[0], known, 0)], [7], known)
    state = trials.begin()
    kept = state["inputs"].clone()
    state["curve"][0], state["matching"][:], state["clock"][:] = 1, torch.tensor([2e4, 0.5, 2e4]), 5
    state["attempt"][2] = 1
    trials.begin_again(state)
    assert state["attempt"].tolist() == [1, 0, 1] and state["clock"].tolist() == [0, 5, 60]
    assert torch.equal(state["inputs"][0], trials.start(0, 1)["inputs"]) and not torch.equal(
        state["inputs"][0], kept[0]
    )
    assert torch.equal(state["inputs"][1:], kept[1:])


def test_a_target_whose_every_trial_diverges_says_so():
    class Never(nn.Module):
        def forward(self, x):
            return x * torch.nan

    net = nn.Sequential(Never(), *scenes.network()).eval()
    view = ServerView(scenes.view(net, scenes.batch(0)).sent, scenes.view(scenes.network(), scenes.batch(0)).update)
    named = {f"{int(name[0]) + 1}{name[1:]}": value for name, value in view.update.values.items()}
    (found,) = run(
        replace(QUICK, retries=1), [[ServerView(view.sent, type(view.update)(named))]], scenes.knowledge(net)
    )
    assert found.loss == torch.inf and found.diverged == 1 and "every trial diverged" in found.note
    assert found.batch.inputs.isfinite().all()


def test_targets_of_different_sent_models_and_of_several_rounds():
    nets = [scenes.network(seed) for seed in range(3)]
    truths = [scenes.batch(i) for i in range(2)]
    known = scenes.knowledge(nets[0])
    own = [[scenes.view(net, truth)] for net, truth in zip(nets, truths, strict=False)]
    for found in run(QUICK, own, known):
        assert found.loss < 0.1
    mixed = [own[0], [scenes.view(net, truths[1]) for net in nets]]
    one_round, three_rounds = run(QUICK, mixed, known)
    assert one_round.loss < 0.1
    one, three = (scenes.mse(r, truths[1]) for r in (run(QUICK, own, known)[1], three_rounds))
    assert three < one, "more rounds tell more"


def test_the_loss_of_joined_rounds_is_the_sum_of_theirs_and_one_round_alone_is_as_ever():
    nets, truth = [scenes.network(seed) for seed in range(2)], scenes.batch(0)
    known, views = scenes.knowledge(nets[0]), [scenes.view(net, truth) for net in nets]
    aims = [[aim_at(QUICK, part, known, 0)] for part in (views[:1], views[1:], views)]
    first, second, both = (replace(QUICK, tv=0.1).trials(aim, [7], known) for aim in aims)
    state = both.begin()
    looks = [trials.look(state) for trials in (first, second, both)]
    for part in ("total", "matching"):
        one, two, joined = (getattr(look, part) for look in looks)
        torch.testing.assert_close(joined, one + two)
    one, two, joined = (look.gradient["inputs"] for look in looks)
    torch.testing.assert_close(joined, one + two)
    (alone,), (repeated,) = run(BRIEF, [views[:1]], known), run(BRIEF, [views[:1] * 2], known)
    assert repeated.loss == pytest.approx(2 * alone.loss) and torch.equal(repeated.batch.inputs, alone.batch.inputs)


@pytest.mark.parametrize("name", ["natural", "smoothing"])
def test_natural_coordinates_and_smoothing_take_the_loss_down_and_state_that_of_the_picture(name):
    _, _, targets, known = scene(1)
    attack = replace(QUICK, **{name: 0.002}, sign=False, schedule="warmup-cosine")
    (found,) = run(attack, targets, known)
    aim = aim_at(attack, targets[0], known, 0)
    look = replace(attack, smoothing=0).trials([aim], [0], known).look({"inputs": found.batch.inputs[None]})
    assert found.loss < found.curve[0][1] / 5 and found.loss == pytest.approx(float(look.matching))
    with pytest.raises(WrongInput, match=f"{name}: changes the steps of adam, not of lbfgs"):
        replace(attack, optimizer="lbfgs").check(known, targets[0][0])


def test_a_smoothed_objective_is_that_of_noisy_pictures_until_the_last_fifth():
    _, _, targets, known = scene(1)
    aims = [aim_at(QUICK, targets[0], known, 0)]
    smooth, plain = (replace(QUICK, smoothing=s, box=False).trials(aims, [7], known) for s in (0.2, 0.0))
    state = smooth.begin()
    smooth.draw(state, 0)
    for clock, deviation in ((0, 0.2), (24, 0.1), (48, 0.0), (60, 0.0)):  # 48 of 60 are four fifths
        state["clock"].fill_(clock)
        noisy = state | {"inputs": state["inputs"] + deviation / float(known.std.flatten()[0]) * state["noise"]}
        torch.testing.assert_close(smooth.look(state).total, plain.look(noisy).total)


def test_the_local_steps_of_weights_are_unrolled():
    net = scenes.network()
    truth = scenes.batch(0, 2)
    local = {"steps": 3, "learning_rate": 0.5, "step_batch": 1}
    target = [scenes.weights_view(net, truth, **local)]
    known = scenes.knowledge(
        net, batch_size=2, learning_rate=0.5, local_steps=3, local_batch=1, labels=truth.labels[None]
    )
    (unrolled,) = run(replace(QUICK, iterations=150), [target], known)
    (blind,) = run(replace(QUICK, iterations=150), [target], replace(known, local_steps=1, local_batch=None))
    assert unrolled.loss < blind.loss / 2


@pytest.mark.parametrize("mode", ["eval", "batch"])
def test_batchnorm_of_both_kinds(mode):
    net = scenes.network(batchnorm=True)
    truth = scenes.batch(0, 2)
    known = scenes.knowledge(net, batch_size=2, batchnorm=mode, labels=truth.labels[None])
    before = {name: value.clone() for name, value in net.state_dict().items()}
    (found,) = run(replace(QUICK, iterations=200), [[scenes.view(net, truth, mode)]], known)
    assert found.loss < 0.1
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_running_statistics_of_a_network_that_has_seen_no_batch_are_no_prior():
    net = scenes.network(batchnorm=True)
    truth = scenes.batch(0)
    known = scenes.knowledge(net, labels=truth.labels[None])
    (plain,) = run(BRIEF, [[scenes.view(net, truth)]], known)
    (fresh,) = run(replace(BRIEF, batchnorm=0.5), [[scenes.view(net, truth)]], known)
    assert torch.equal(plain.batch.inputs, fresh.batch.inputs) and "seen no batch" in fresh.note

    net[1].num_batches_tracked += 1  # the same statistics, as of real data
    (used,) = run(replace(BRIEF, batchnorm=0.5), [[scenes.view(net, truth)]], known)
    assert not torch.equal(plain.batch.inputs, used.batch.inputs) and "seen no batch" not in (used.note or "")


def test_exact_statistics_help_more_than_running_ones():
    net = scenes.network(batchnorm=True)
    truth = scenes.batch(0)
    known = scenes.knowledge(net, labels=truth.labels[None])
    attack = replace(QUICK, batchnorm=0.1, distance="euclidean", sign=False)
    target = [scenes.view(net, truth)]
    net[1].num_batches_tracked += 1  # as if they were of real data
    (running,) = run(attack, [[scenes.view(net, truth)]], known)
    (exact,) = run(attack, [target], replace(known, statistics=[scenes.statistics(net, truth)]))
    assert scenes.mse(exact, truth) < scenes.mse(running, truth)


@pytest.mark.parametrize("adaptive", ["support", "layer", "reapply", "mask"])
def test_every_adaptive_attacker_runs_on_a_pruned_update(adaptive):
    _, _, targets, known = scene(2)
    views = []
    for (view,) in targets:
        pruned = {n: torch.where(v.abs() >= v.abs().median(), v, 0) for n, v in view.update.values.items()}
        views.append([ServerView(view.sent, type(view.update)(pruned))])
    watch = scenes.Diary()
    for found in run(replace(QUICK, adaptive=adaptive), views, known, watch=watch):
        assert found.loss < found.curve[0][1] / 2 and found.loss == found.loss
    assert watch.iterations == QUICK.iterations, "the bar ends where its length is, also if targets go one by one"


def test_matching_on_the_support_finds_what_plain_matching_of_a_pruned_update_cannot():
    _, truths, targets, known = scene(1)
    view = targets[0][0]
    pruned = {n: torch.where(v.abs() >= v.abs().median(), v, 0) for n, v in view.update.values.items()}
    target = [ServerView(view.sent, type(view.update)(pruned))]
    attack = replace(QUICK, iterations=300)
    plain, adaptive = (run(replace(attack, adaptive=a), [target], known)[0] for a in ("none", "support"))
    assert scenes.mse(adaptive, truths[0]) < scenes.mse(plain, truths[0])


def test_wrong_input_is_refused_before_any_work():
    _, _, targets, known = scene(1)
    view = targets[0][0]
    for change, match in (
        ({"iterations": 0}, "iterations"),
        ({"restarts": 0}, "restarts"),
        ({"learning_rate": 0.0}, "learning_rate: 0.0 is not allowed"),
        ({"learning_rate": float("nan")}, "learning_rate: nan is not allowed"),
        ({"tv": -1.0}, "tv: -1.0 is not allowed"),
        ({"noise": -0.1}, "noise: -0.1 is not allowed"),
        ({"retries": -1}, "retries: -1 is not allowed"),
        ({"engine": "warp"}, "engine: 'warp' is not known"),
        ({"labels": "oracle"}, "true labels"),
        ({"adaptive": "layer", "layer": "9"}, "layer: '9' is not known"),
    ):
        with pytest.raises(WrongInput, match=match):
            replace(QUICK, **change).check(known, view)
    with pytest.raises(WrongInput, match="batch_size: 0 is not allowed"):
        QUICK.check(replace(known, batch_size=0), view)
    QUICK.check(known, view)
    assert QUICK.tamper(known.net, view.sent, known, scenes.rng()) == (known.net, view.sent)


def test_the_only_layer_cannot_be_left_out():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).double()
    view = scenes.view(net, scenes.batch(0))
    with pytest.raises(WrongInput, match="adaptive: layer leaves nothing to match: 1 is the only one"):
        replace(QUICK, adaptive="layer").check(scenes.knowledge(net), view)


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_a_parameter_that_the_network_does_not_use_is_matched_as_zero(engine):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare, self.last = nn.Linear(2, 2), nn.Linear(16, 4)

        def forward(self, x):
            return self.last(x.flatten(1))

    net = Odd().double()
    targets = [[scenes.view(net, scenes.batch(0))]]
    (found,) = run(replace(QUICK, engine=engine), targets, scenes.knowledge(net))
    assert found.loss < found.curve[0][1] / 5


def test_presets_carry_their_sources_numbers():
    def numbers(name):
        made = catalogue.find("inversion", name)()
        return made.iterations, made.learning_rate, made.tv

    assert numbers("ig") == (2500, 0.1, 1e-4)
    assert numbers("ig-dgp") == (12_000, 0.1, 0.2)
    assert numbers("ig-geiping") == (4800, 0.1, 0.1)
    assert numbers("ig-geiping-24k") == (24_000, 0.1, 1e-4)
    assert numbers("ig-breaching") == (24_000, 0.1, 0.2)
    assert catalogue.find("inversion", "ig-breaching")().objective.tv == 0.1, "the mean of dx and dy is half their sum"
    assert numbers("ig-ats") == (4800, 0.1, 1e-4)
    assert numbers("ig-precode") == (7000, 0.01, 1e-6)
    assert numbers("sgi")[:2] == numbers("gi-priprune")[:2] == (10_000, 0.01)
    assert numbers("dlg") == numbers("idlg") == (300, 1.0, 0)
    gi, dgp = (catalogue.find("inversion", name)() for name in ("gi", "gi-dgp"))
    assert (gi.tv, gi.l2, gi.batchnorm, gi.group, gi.noise, gi.restarts) == (1e-4, 1e-6, 0.1, 0.01, 0.2, 8)
    assert (dgp.iterations, dgp.sign, dgp.scale, dgp.batchnorm, dgp.noise) == (20_000, True, 1e-4, 0.01, 0.02)
    paper = catalogue.find("inversion", "gi-dgp-paper")()
    assert replace(dgp, iterations=2500, scale=1.0).objective == paper.objective and gi.scale == 1
    assert numbers("gi-dgp-paper") == (2500, 0.1, 1e-4)


def test_ig_is_the_loop_that_its_paper_describes():
    """Written again with torch.optim alone: sign into Adam, the three falls of the rate, the box, TV, the cosine."""
    net, (truth,), targets, known = scene(1)
    attack = replace(QUICK, iterations=16, tv=0.05)

    (found,) = run(attack, targets, known)
    seed = int(torch.randint(2**62, (), generator=scenes.rng(0)))
    x = torch.randn(1, *scenes.SHAPE, generator=derive(seed, "start", 0, 0)).double().requires_grad_()
    adam = torch.optim.Adam([x], lr=0.1)
    falls = torch.optim.lr_scheduler.MultiStepLR(adam, [6, 10, 14])
    sent = torch.cat([value.flatten() for value in targets[0][0].update.values.values()])
    for _ in range(16):
        loss = nn.functional.cross_entropy(net(x), truth.labels)
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        own = torch.cat([value.flatten() for value in grads])
        tv = x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()
        x.grad = torch.autograd.grad(1 - torch.cosine_similarity(own, sent, 0) + 0.05 * tv, x)[0].sign()
        adam.step()
        falls.step()
        x.data.clamp_(-1, 1)
    torch.testing.assert_close(found.batch.inputs, x.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("power", [63, -100])
def test_a_scaled_gradient_reveals_as_much(power):
    net = scenes.network(dtype=torch.float32)
    truth = scenes.batch(0, dtype=torch.float32)
    seen, known = scenes.view(net, truth), scenes.knowledge(net)
    scaled = Gradient({name: torch.ldexp(value, torch.tensor(power)) for name, value in seen.update.values.items()})
    plain, other = (run(QUICK, [[view]], known)[0] for view in (seen, ServerView(seen.sent, scaled)))
    assert plain.loss == other.loss < plain.curve[0][1] / 5
    assert torch.equal(plain.batch.inputs, other.batch.inputs)


def test_targets_are_halved_where_memory_runs_out(monkeypatch, caplog):
    _, _, targets, known = scene(5)
    attack = replace(BRIEF, restarts=2, iterations=5)
    plain, whole, sizes = run(attack, targets, known), optimisation.Trials.run, []

    def tight(self, *rest):
        sizes.append(len(self.seeds))
        if len(self.seeds) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, *rest)

    monkeypatch.setattr(optimisation.Trials, "run", tight)
    for one, other in zip(plain, run(attack, targets, known), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-9) and one.trial == other.trial
        torch.testing.assert_close(one.batch.inputs, other.batch.inputs, rtol=1e-9, atol=1e-9)
    assert sizes == [5, 3, 2, 2, 1] and "memory ran out with 5 trials" in caplog.text
