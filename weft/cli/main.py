"""The ``weft`` command. Commands live in the sibling modules; this one joins them and turns errors into exit codes.

Exit codes: 0 ok, 1 plans differ (``diff``), 2 bad input or an output that cannot be written, 3 no plan fits, 4 a run
failed, and after a signal 128 + its number: 129 the terminal is gone, 130 interrupted, 143 told to end. Results go to
stdout, everything else to stderr. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import signal
import sys

import typer

from weft.base.ending import end_on_signals, finish_output, output_failed
from weft.base.errors import WeftError
from weft.cli import (
    deploy_commands,
    explain_commands,
    export_commands,
    input_commands,
    place_commands,
    plan_commands,
    run_commands,
    schedule_commands,
    shard_commands,
)
from weft.cli.common import INTERRUPTED, with_recompute_words

app = typer.Typer(
    name="weft", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Plans how a neural network runs across many devices, predicts how fast that is, and runs it that way.",
    epilog="Exit codes: 0 ok, 1 plans differ (diff), 2 bad input, an output that cannot be written or too little "
           "memory here, 3 no plan fits, 4 a run failed; after a signal 128 + its number: 129 hangup, 130 interrupted, "
           "143 told to end.")
for command in (
        input_commands.models, input_commands.profile, plan_commands.plan, plan_commands.simulate, plan_commands.show,
        plan_commands.view, plan_commands.check, plan_commands.diff, explain_commands.explain, explain_commands.fit,
        export_commands.export, export_commands.import_order, run_commands.run, schedule_commands.schedule,
        place_commands.place, shard_commands.shard, deploy_commands.deploy, deploy_commands.train_policy):
    app.command()(command)
app.add_typer(input_commands.app, name="cluster")


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    command = typer.main.get_command(app)
    try:
        given = with_recompute_words(sys.argv[1:] if arguments is None else list(arguments))
        result = command.main(args=given, prog_name="weft", standalone_mode=False)
    except WeftError as problem:
        print(f"weft: {problem}", file=sys.stderr)
        return problem.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print("weft: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except MemoryError:
        print("weft: this machine has too little memory for the command: free some, or try a smaller input",
              file=sys.stderr)
        return 2
    except OSError as problem:
        if problem.filename is not None or problem.errno is None:
            raise
        return output_failed(problem)
    except Exception as problem:
        if type(problem).__module__.startswith(("click", "typer")) and hasattr(problem, "show"):
            problem.show()
            return 2
        raise
    if result == INTERRUPTED:  # Typer's word for Ctrl-C
        print("weft: interrupted", file=sys.stderr)
    return result if isinstance(result, int) else 0


def entry() -> None:
    """Run the command line and exit with its code."""
    end_on_signals()
    try:
        code = finish_output(main())
    except KeyboardInterrupt:  # while the end of another one was told
        code = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # there is nothing left to end, and Python would show where it was
    exec("")  # Ctrl-C inside code made of text, as imports have, would be Python's last word otherwise
    sys.exit(code)


if __name__ == "__main__":
    entry()
