"""The client: trains, and sends its weights. The mod is the one line that was added."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import RATE, network, picture_of, train
from secateur.defenses.dgp import DualGradientPruning
from secateur.federated.flower import upload_mod

app = ClientApp(mods=[upload_mod(DualGradientPruning(k1=0.05, k2=0.75), wire=True)])


def turn(message: Message, context: Context) -> Message:
    """One local step from the model that was received."""
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client, number = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
    inputs, labels = picture_of(client, number)
    loss = train(net, inputs, labels, float(context.run_config.get("learning-rate", RATE)))
    metrics = MetricRecord({"loss": loss, "num-examples": len(labels), "client": client})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


app.train()(turn)
