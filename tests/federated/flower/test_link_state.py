"""The simulation's state with a queue for each node: what Flower's own answers, without a look at every message."""

import importlib
import secrets
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.server.superlink.linkstate import InMemoryLinkState

from secateur.federated.flower import link_state
from secateur.federated.flower.link_state import IndexedLinkState, IndexedStateFactory, indexed_state

NODES = 20


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """The identity of the server's task, which a simulation sets."""
    task = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    for name, value in {"_task_id": 1, "_run_id": 7, "_node_id": 1}.items():
        monkeypatch.setattr(task, name, value)


def filled(kind, nodes=NODES, ttl=100.0):
    """A state of nodes with two messages each; the state, the nodes and the ids of the messages."""
    module = importlib.import_module(link_state.SIMULATION)
    vce = importlib.import_module("flwr.server.superlink.fleet.vce.vce_api")
    run = importlib.import_module("flwr.supercore.run").Run.create_empty(7)
    run.primary_task_id, run.federation_id = 1, module.NOOP_FEDERATION_ID
    state = kind(module.NoOpFederationManager(), module.ObjectStoreFactory().store())
    state.run_ids[7] = module.RunRecord(run=run)
    state.task_store[1] = module.Task(task_id=1, run_id=7)
    owner = vce.NOOP_FLWR_AID, vce.NOOP_ACCOUNT_NAME
    idents = [
        state.create_node(*owner, secrets.token_bytes(32), heartbeat_interval=vce.HEARTBEAT_INTERVAL_INF)
        for _ in range(nodes)
    ]
    for node in idents:
        state.acknowledge_node_heartbeat(node_id=node, heartbeat_interval=vce.HEARTBEAT_INTERVAL_INF)
    grid = module.InMemoryGrid(state_factory=SimpleNamespace(state=lambda: state))
    grid.set_run(run)
    content = RecordDict({"turn": ConfigRecord({"hello": True})})
    messages = [Message(content, node, "query", ttl=ttl) for _ in range(2) for node in idents]
    pushed = [ident for message in messages for ident in grid.push_messages([message])]
    return state, idents, pushed


@pytest.mark.parametrize("kind", [InMemoryLinkState, IndexedLinkState])
def test_every_message_is_delivered_once_and_in_order(kind):
    state, nodes, pushed = filled(kind)
    assert all(pushed)
    for first in (0, NODES):
        got = [state.get_message_ins(node_id=node, limit=1) for node in nodes]
        assert [one.metadata.message_id for (one,) in got] == pushed[first : first + NODES]
    assert all(state.get_message_ins(node_id=node, limit=1) == [] for node in nodes)
    state, nodes, pushed = filled(kind)
    assert len(state.get_message_ins(node_id=nodes[3], limit=None)) == 2
    state.delete_messages({pushed[5], pushed[5 + NODES]})
    assert state.get_message_ins(node_id=nodes[5], limit=1) == []


def test_a_sweep_looks_at_each_message_once():
    looks = {}
    for kind in (InMemoryLinkState, IndexedLinkState):
        state, nodes, _ = filled(kind)
        plain, count = state._check_stored_messages, []
        state._check_stored_messages = lambda idents, *rest, c=count, p=plain: (c.extend(idents), p(idents, *rest))[1]
        for node in nodes:
            state.get_message_ins(node_id=node, limit=1)
        looks[kind] = len(count)
    assert looks[IndexedLinkState] == NODES
    assert looks[InMemoryLinkState] > 5 * NODES  # when this fails, Flower has mended it, and ours can go


def test_a_simulation_takes_it_and_gives_it_back():
    module = importlib.import_module(link_state.SIMULATION)
    usual = module.LinkStateFactory
    with indexed_state():
        assert module.LinkStateFactory is IndexedStateFactory
        factory = module.LinkStateFactory(":memory:", module.NoOpFederationManager(), module.ObjectStoreFactory())
        assert isinstance(factory.state(), IndexedLinkState) and factory.state() is factory.state()
    assert module.LinkStateFactory is usual
