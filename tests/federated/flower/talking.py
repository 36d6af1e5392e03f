"""Messages as Flower's runtime makes them, without a runtime."""

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from secateur.federated.flower.link import arrays_of

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # what a runtime sets in every process


def context(partition=0, node=7, run=None, **more):
    config = {"partition-id": partition} | {name.replace("_", "-"): value for name, value in more.items()}
    return Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config=run or {})


def asked(tensors, number=1, kind="train", node=7):
    content = RecordDict({"arrays": arrays_of(tensors), "config": ConfigRecord({"server-round": number})})
    return delivered(Message(content, node, kind))


def delivered(message, ident="1"):
    message.metadata.__dict__["_message_id"] = ident
    return message


def answer(message, tensors, examples=1):
    content = RecordDict({"arrays": arrays_of(tensors), "metrics": MetricRecord({"num-examples": examples})})
    return Message(content, reply_to=message)
