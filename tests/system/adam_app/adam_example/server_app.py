"""The server: federated averaging."""

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from adam_example.task import Net

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    if config["fault"] == "server":
        raise ValueError("the license of this server is over")
    strategy = FedAvg(fraction_evaluate=config["fraction-evaluate"])
    arrays, lr = ArrayRecord(Net().state_dict()), ConfigRecord({"lr": config["learning-rate"]})
    strategy.start(grid=grid, initial_arrays=arrays, train_config=lr, num_rounds=config["num-server-rounds"])
