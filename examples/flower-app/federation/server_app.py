"""The server: runs what the run configuration says, and writes rows and a page into its folder `out`."""

from secateur.federated.flower.app import server_app

app = server_app()
