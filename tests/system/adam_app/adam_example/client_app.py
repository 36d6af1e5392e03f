"""The clients: they train and evaluate."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from adam_example.task import Net, load_data
from adam_example.task import test as test_fn
from adam_example.task import train as train_fn


def filter_mod(message, context, call_next):
    """A filter that its author forgot to finish."""
    return call_next(message, context)


app = ClientApp(mods=[filter_mod])


def load(message, context):
    """The received model, and the client's data."""
    net, config, node = Net(), context.run_config, context.node_config
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = node["partition-id"], node["num-partitions"], config["batch-size"], config["examples"]
    return net, load_data(*data)


@app.train()
def train(message, context):
    if context.run_config["fault"] == "client":
        raise ValueError("the disk of this client is full")
    net, (loader, _) = load(message, context)
    config = context.run_config
    loss = train_fn(net, loader, config["local-epochs"], config["optimizer"], message.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    net, (_, loader) = load(message, context)
    metrics = MetricRecord({"eval_acc": test_fn(net, loader), "num-examples": len(loader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
