"""A server that can be held between two rounds."""

import time
from pathlib import Path

from flwr.serverapp import ServerApp

from secateur.federated.flower import app as apps
from secateur.federated.flower.link import Link

app = ServerApp()


@app.main()
def main(grid, context):
    stage, held, *_ = [context.run_config.pop(name) for name in ("stage", "held", "stuck", "lies")]
    rounds, plain = iter(range(1, 1000)), Link.greet_nodes

    def meet(self):
        if next(rounds) == held:
            Path(stage, "held").touch()
            while not Path(stage, "go").exists():
                time.sleep(0.1)
        plain(self)

    Link.greet_nodes = meet
    apps.server_app()(grid, context)
