"""A job of four clients in FLARE's simulator: a defended one, one by weights, one whose filter does nothing, a liar."""

import sys

from flare_parts import RATE, Step, WriteDown
from nvflare import FedJob, FilterType

from secateur.federated.flare import AuditFilter, UploadFilter

out = sys.argv[1]
job = FedJob(name="filters")
job.to(WriteDown(f"{out}/seen.json", clients=4), "server")
result = {"tasks": ["train"], "filter_type": FilterType.TASK_RESULT}
data = {"tasks": ["train"], "filter_type": FilterType.TASK_DATA}
sites = {
    "site-1": (Step("WEIGHT_DIFF"), "dgp:k1=0.05:k2=0.75+error-feedback"),
    "site-2": (Step("WEIGHTS"), "top-k:keep=0.2"),
    "site-3": (Step("WEIGHT_DIFF"), "noise:sigma=0"),
    "site-4": (Step("METRICS"), "top-k:keep=0.2"),
}
for site, (executor, defense) in sites.items():
    job.to(executor, site, tasks=["train"])
    job.to(UploadFilter(defense), site, **result)
    if site == "site-2":
        job.to(UploadFilter(defense), site, **data)
        job.to(AuditFilter("flare_parts:network", [1, 8, 8], 10, RATE, out, iterations=20, every=2), site, **result)
job.simulator_run(f"{out}/workspace", threads=4)
