"""A Grid whose nodes are functions in this process: answers are made when they are fetched, one at a time."""

import itertools

import talking
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict

from secateur.federated.flower.client import Clients
from secateur.federated.flower.federation import FlowerFederation
from secateur.federated.flower.link import HELLO, Link


class Near:
    """`answer(client, content, home)` is every node's app; a node is a client's number and 100."""

    def __init__(self, answer, clients, spoil=None, silent=(), says=None, examples=lambda client: 0):
        self.answer, self.nodes, self.spoil, self.silent = answer, [100 + i for i in range(clients)], spoil, set(silent)
        self.says, self.examples = says or (lambda client: client), examples
        self.homes = {node: talking.context(node=node) for node in self.nodes}
        self.pending, self.counter, self.most = {}, itertools.count(1), 0

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        idents = []
        for message in messages:
            ident = str(next(self.counter))
            self.pending[ident] = talking.delivered(message, ident)
            idents.append(ident)
        return idents

    def pull_messages(self, idents):
        self.most = max(self.most, len(idents))
        return [self._reply(self.pending.pop(i)) for i in idents if self._answers(self.pending[i])]

    def _answers(self, message):
        return message.metadata.dst_node_id - 100 not in self.silent or message.metadata.message_type == HELLO

    def _reply(self, message):
        node = message.metadata.dst_node_id
        if message.metadata.message_type == HELLO:
            told = {"client": self.says(node - 100), "examples": self.examples(node - 100)}
            return Message(RecordDict({"turn": ConfigRecord(told)}), reply_to=message)
        try:
            with torch.enable_grad():  # a client does not live inside of its server
                content = self.answer(message.content, self.homes[node].state)
        except Exception as error:
            return Message(Error(1, repr(error)), reply_to=message)
        if self.spoil is not None:
            content = self.spoil(node - 100, message.content.config_records["turn"]["round"], content)
        return Message(content, reply_to=message)


def over_flower(here, spoil=None, silent=(), deadline=0.5, observers=()):
    """The same federation as one in process, over a Grid."""
    clients = Clients(here.net, here.train, here.terms, here.seed, here.device)
    grid = Near(clients.answer, len(here.terms.shares), spoil, silent)
    link = Link(grid, deadline, patience=1)
    return FlowerFederation(link, "{}", here.net, here.data, here.terms, here.seed, observers=observers), grid
