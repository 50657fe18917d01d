"""The layout of panels as a workspace of Weights & Biases:

    python -m utils.dashboards.workspace --entity NAME --project oct-foundation

In: the panels of utils.dashboards.panels. Out: a saved view of the project, with a section for each question;
what else is logged, pictures among it, stands in sections of its own below. It needs the package
wandb-workspaces, a key and the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from utils.cli import run_cli
from utils.config.schema import WandbConfig
from utils.dashboards import panels
from utils.dashboards.weights_and_biases import has_api_key
from utils.errors import UserError
from utils.help_pages import PeopleParser
from utils.storage.retry import describe

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

NAME = "Does it learn, collapse, cheat?"


def workspace(entity: str, project: str) -> Workspace:
    """The sections and line plots over the optimizer step, not saved yet."""
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Section, Workspace

    sections = [
        Section(
            name=question,
            is_open=True,
            panels=[LinePlot(title=panel.title, x="Step", y=list(panel.metrics)) for panel in of_question],
        )
        for question, of_question in panels.SECTIONS.items()
    ]
    return Workspace(entity=entity, project=project, name=NAME, sections=sections, auto_generate_panels=True)


def save(entity: str, project: str) -> str:
    """Save it as a new view; returns its address. Raises UserError without the package, a key or a server."""
    if find_spec("wandb_workspaces") is None:
        raise UserError("expected the package wandb-workspaces, found none; pip install wandb-workspaces")
    import requests
    import wandb

    if not has_api_key(wandb.setup().settings.base_url):
        raise UserError("expected a key of Weights & Biases, found none; wandb login")
    view = workspace(entity, project)
    try:
        return view.save().url
    except (wandb.Error, requests.RequestException) as error:
        raise UserError(f"Weights & Biases did not save the view: {describe(error)}") from error


def main(argv: Sequence[str] | None = None) -> None:
    """Save the layout of panels as a view of a project in Weights & Biases."""
    parser = PeopleParser("utils.dashboards.workspace", __doc__ or "")
    parser.add_argument("--entity", required=True, metavar="NAME", help="the user or team of the project")
    parser.add_argument(
        "--project", default=WandbConfig().project, help="wandb.project of the runs (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    print(save(args.entity, args.project))


if __name__ == "__main__":
    run_cli(main)
