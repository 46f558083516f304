"""``weft view``: the report of a plan in the browser, served to this machine only."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from weft.cli.common import PlanArgument, ProfileOption
from weft.cli.plan_commands import ClusterOption, ModelOption, TimelineOption, predict_plan


def view(
    plan: PlanArgument,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    profile: ProfileOption = None,
    timeline: TimelineOption = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """Show a plan's report in the browser, on this machine only, until Ctrl-C."""
    from weft.cluster import read_cluster
    from weft.plan.plan import load_plan
    from weft.show.html import render_report
    from weft.show.page import PageServer
    from weft.simulate.timeline_file import load_timeline

    predicted = predict_plan(load_plan(plan), model, cluster, profile)
    others = [load_timeline(path, program=predicted.program) for path in timeline or ()]
    page = render_report([predicted, *others], cluster=None if cluster is None else read_cluster(cluster))
    with PageServer(page, port=port) as server:
        print(server.address, flush=True)
        print("Ctrl-C ends it.", file=sys.stderr, flush=True)
        if open_browser:
            _open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended", file=sys.stderr)


def _open(address: str) -> None:
    """Open the address beside the server, since some browsers keep the caller waiting."""
    import threading
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
