"""The client: takes turns with the data of its machine, and keeps its state to itself."""

from secateur.federated.flower.app import client_app

app = client_app()
