"""Flower's pauses made shorter, and messages that a restarted superlink has in part.

Each test of Flower's own pause says when ours can go: it fails when Flower no longer waits so long.
"""

import importlib
import os
import time

import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, ObjectUnavailableError
from near import Near

from secateur.federated.flower import nodes
from secateur.federated.flower.link import Link, shorten_pulls

SUPERNODE = importlib.import_module("flwr.supernode.start_client_internal")
PULLS = (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree)


@pytest.fixture
def usual(monkeypatch):
    """Flower's own pulls, which the test may shorten."""
    for pull in PULLS:
        monkeypatch.setattr(pull, "__kwdefaults__", dict(pull.__kwdefaults__))


def coming(after):
    """A part of a message that is there after so many questions."""
    asked = []

    def pull(ident):
        asked.append(ident)
        if len(asked) <= after:
            raise ObjectUnavailableError(ident)
        return b"part"

    return pull


def test_flower_waits_a_second_for_a_part_of_a_message(usual):
    for pull in PULLS:
        assert pull.__kwdefaults__["initial_backoff"] >= 1  # when this fails, Flower has mended it, and ours can go
        assert pull.__kwdefaults__["max_time"] > 600


def test_a_part_that_comes_late_is_asked_for_soon_and_one_that_never_comes_is_given_up(usual):
    Link(Near(None, 1), deadline=0.2, deployed=True)
    begun = time.monotonic()
    assert inflatable_utils.pull_objects(["a"], coming(after=2)) == {"a": b"part"}
    with pytest.raises(ObjectPullError):
        inflatable_utils.pull_objects(["a"], coming(after=99))
    assert time.monotonic() - begun < 1


def test_a_node_waits_for_parts_as_long_as_flower_does(usual):
    before = PULLS[1].__kwdefaults__["max_time"]
    shorten_pulls()
    assert PULLS[1].__kwdefaults__["initial_backoff"] < 0.1 and PULLS[1].__kwdefaults__["max_time"] == before


class Restarted(Near):
    """A superlink that was restarted while a message was pushed: it refuses so many pushes."""

    def __init__(self, refusals):
        super().__init__(lambda content, home: content, 1)
        self.refusals, self.pushed = refusals, []

    def push_messages(self, messages):
        self.pushed += messages
        if len(self.pushed) <= self.refusals:
            raise ObjectPushError("part", 1, "session")
        return super().push_messages(messages)


@pytest.mark.parametrize(("refusals", "answers"), [(1, True), (99, False)])
def test_a_message_that_a_restarted_superlink_refuses_is_pushed_again(refusals, answers):
    grid = Restarted(refusals)
    link = Link(grid, 0.5)
    link.nodes = {0: 100}
    ((client, answer),) = link.ask("train", [(0, RecordDict({"turn": ConfigRecord({"round": 1})}))])
    assert client == 0 and (answer == "absent") != answers
    assert len(set(map(id, grid.pushed))) == 1  # the same message: the superlink knows the parts that it has


class Enough(Exception):
    """The end of a supernode's loop."""


def test_a_supernode_announces_its_message_and_looks_often_for_the_answer(monkeypatch):
    monkeypatch.setattr(SUPERNODE, "time", SUPERNODE.time)
    slept, announced = [], []
    monkeypatch.setattr(time, "sleep", slept.append)
    nodes.shorten_pauses(0.1, lambda: announced.append(len(slept)))

    class State:
        def __getattr__(self, name):  # Flower renames the function that looks for answers
            def look(**_):
                if len(slept) == 3:
                    raise Enough
                return []

            return look

    with pytest.raises(Enough):
        SUPERNODE._push_messages(State(), None, None, None)
    assert announced == [0] and slept == [nodes.LOOK] * 3
    SUPERNODE.time.sleep(3)  # Flower's pause between two questions for messages
    assert announced == [0] and slept[-1] == 0.1
    assert SUPERNODE.time.monotonic is time.monotonic


def test_announced_numbers_are_read_at_once_and_nothing_is_awaited_for_long():
    source, sink = os.pipe()
    assert nodes.read_numbers(source, 0.01) == set()
    for number in (3, 70_000, 3):
        nodes.write_number(sink, number)
    assert nodes.read_numbers(source, 60) == {3, 70_000}
    os.close(source), os.close(sink)
