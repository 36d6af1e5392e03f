"""The client: builds the network that it was sent, trains it, and sends it back. The mods are all that was added."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app.task import SHAPE, network, train
from secateur.federated.flower import download_mod, network_of, upload_mod

MODS = [download_mod(), upload_mod(wire=True)]  # the defense comes from the run's config
app = ClientApp(mods=MODS)


def turn(message: Message, context: Context) -> Message:
    """One epoch from the model that was received."""
    net = network_of(message, network(), SHAPE)
    rate = float(context.run_config.get("learning-rate", 0.2))
    examples = train(net, int(context.node_config["partition-id"]), rate)
    metrics = MetricRecord({"num-examples": examples})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


app.train()(turn)
