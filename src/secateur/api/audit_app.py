"""`secateur.audit_app(...)`: an existing Flower app in simulation, its clients' updates attacked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secateur.api import Printable
from secateur.config import AuditApp, read
from secateur.experiments.audit_app import run_audit_app
from secateur.report.federation import OBSERVED
from secateur.runs.folder import load_figures
from secateur.runs.rows import Row


@dataclass(frozen=True, eq=False)
class AuditedApp(Printable):
    """Result of the audit of a Flower app: the rows and the figures."""

    kind = "audit-app"
    rows: list[Row]
    figures: list[dict[str, Any]]

    @property
    def findings(self) -> dict[str, list[str]]:
        """The sentences on the clients' training, on what is sent, and on its imitation, by defense."""
        lines: dict[str, list[str]] = {}
        for row in self.rows:
            if row.metric in OBSERVED and row.note:
                lines.setdefault(str(row.defense), []).append(row.note)
        return lines


def audit_app(folder: Path | str, out: Path | str, **settings: Any) -> AuditedApp:
    """Run an existing Flower app in simulation, attack its clients' updates, and return the rows and figures.

    The app's code runs as it is, in processes of Ray.

    Args:
        folder: the app, with its pyproject.toml.
        out: the folder of the run; calling again with the same settings resumes it.
        settings: the flags of `secateur audit-app`, such as defense="none,dgp", clients=4, iterations=600 or
            run_config="batch-size=8 local-epochs=1".
    """
    rows = run_audit_app(read(AuditApp, None, {"app": str(folder)} | settings), Path(out))
    return AuditedApp(rows, load_figures(out))
