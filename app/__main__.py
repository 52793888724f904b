"""The commands: serve, build, check, inspect, report, plan, keygen, sign, verify."""

import gc
import os
import signal

# Before anything slow is imported: as process 1 of a container the kernel ignores a signal without a handler.
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

# Imports make objects that stay; collecting among them finds nothing. `serve` turns it on again once ready.
gc.disable()

import json
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from app.errors import ArtifactError, WarmgateError

cli = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

Config = Annotated[Path, typer.Option("--config", help="The YAML file.")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="a.b=value; wins over file and environment.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class LogFormat(StrEnum):
    """How a server tells what happens."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


Format = Annotated[LogFormat, typer.Option("--log-format", help="auto: text on a terminal, JSON lines elsewhere.")]


@cli.command()
def serve(config: Config, assignments: Assignments = None, log_format: Format = LogFormat.AUTO) -> None:
    """Run the sidecar until SIGTERM."""
    from app import configure, endings, logs, server
    from app.console import JsonConsole, TextConsole
    from app.settings import StartupSettings

    people = log_format is LogFormat.TEXT or (log_format is LogFormat.AUTO and sys.stdout.isatty())
    logs.configure(people)
    termination_log = StartupSettings().termination_log
    try:
        loaded = configure.load(config, assignments or [])
        termination_log = loaded.startup.termination_log
        code = server.serve(loaded, TextConsole() if people else JsonConsole())
    except WarmgateError as error:
        endings.tell_fatal(error, None, termination_log)
        raise
    endings.leave(code)


@cli.command()
def build(
    config: Config,
    assignments: Assignments = None,
    prune: Annotated[bool, typer.Option("--prune", help="Then remove from the store what nobody uses.")] = False,
    keep: Annotated[int, typer.Option("--keep", min=0, help="--prune keeps the newest N of each model.")] = 2,
    unused_days: Annotated[float, typer.Option("--unused-days", min=0, help="--prune keeps what was used since.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Build the compile artifact and exit; reads no weights, only the checkpoint's headers."""
    from app import commands, configure
    from app.artifacts.prune import Rules

    rules = Rules(keep, unused_days) if prune else None
    _finish(commands.build(configure.load(config, assignments or []), _teller(as_json), rules), as_json)


@cli.command()
def check(config: Config, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """Validate configuration, checkpoint and artifact without loading weights; print the plan."""
    from app import commands, configure

    _finish(commands.check(configure.load(config, assignments or []), _teller(as_json)), as_json)


@cli.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint, a sealed artifact, or a directory of artifacts.")],
    repack: Annotated[
        Path | None, typer.Option("--repack", help="Write it anew as one safetensors file with aligned tensors.")
    ] = None,
    headers: Annotated[
        Path | None, typer.Option("--headers", help="Make a directory of its headers without data, for `build`.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Compare artifacts with this configuration, too.")
    ] = None,
    assignments: Assignments = None,
    trust_pickle: Annotated[bool, typer.Option("--trust-pickle", help="Open formats that pickles describe.")] = False,
    as_json: AsJson = False,
) -> None:
    """Describe a checkpoint, an artifact (and what keeps it from being used here) or a store: contents, problems."""
    from app import configure, inspection
    from app.checkpoints import open_checkpoint
    from app.headers import copy_headers
    from app.repack import repack as write_anew

    if target := repack or headers:
        # So that what is half written is removed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            written = (write_anew if repack else copy_headers)(open_checkpoint(path, trust_pickle), target)
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGTERM) from None
        told = f"{written['tensors']} tensors, aligned" if repack else f"headers of {len(written['files'])} file(s)"
        print(json.dumps(written) if as_json else f"{written['path']}: {told}")
        return
    document = inspection.inspect(path, trust_pickle, configure.load(config, assignments or []) if config else None)
    print(json.dumps(document) if as_json else inspection.render(document))
    if code := inspection.exit_code(document):
        raise SystemExit(code)


@cli.command()
def keygen(
    out: Annotated[Path, typer.Argument(help="The private key's file; the public one gets .pub added.")],
    as_json: AsJson = False,
) -> None:
    """Make a pair of keys for artifacts; existing files are not overwritten."""
    from app import signing

    made = signing.keygen(out)
    print(
        json.dumps(made)
        if as_json
        else f"key {made['key_id']}: {made['private_key']} signs, {made['public_key']} checks"
    )


@cli.command()
def sign(
    artifact: Annotated[Path, typer.Argument(help="The directory of a sealed artifact.")],
    key: Annotated[Path, typer.Option("--key", help="The private key's file.")],
    as_json: AsJson = False,
) -> None:
    """Sign an artifact that is whole: the manifest, and through its hashes every file."""
    from app import signing

    made = signing.sign(artifact, key)
    print(json.dumps(made) if as_json else f"{made['path']}: signed by key {made['key_id']}")


@cli.command()
def verify(
    artifact: Annotated[Path, typer.Argument(help="The directory of a sealed artifact.")],
    public_key: Annotated[list[Path], typer.Option("--public-key", help="A public key's file; may be repeated.")],
    as_json: AsJson = False,
) -> None:
    """Check signature, sizes and hashes of an artifact; exit code 5 where one does not hold."""
    from app import signing

    verdict = signing.verify(artifact, public_key)
    told = verdict["problem"] or f"{verdict['signature']}, {verdict['files']} files, {verdict['bytes']} bytes"
    print(json.dumps(verdict) if as_json else f"{verdict['path']}: {told}")
    if not verdict["ok"]:
        raise SystemExit(ArtifactError.exit_code)


@cli.command()
def report(
    file: Annotated[Path, typer.Argument(help="A start report.")],
    file2: Annotated[Path | None, typer.Argument(help="Another, to compare with.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a start report as text, or say where the difference between two comes from."""
    from app import comparison, report_file
    from app.report_text import render

    files = [one for one in (file, file2) if one is not None]
    documents = [report_file.document(one) for one in files]
    reports = [report_file.parse(found, str(one)) for found, one in zip(documents, files, strict=True)]
    if as_json:
        print(json.dumps(documents[0] if len(documents) == 1 else comparison.document(*reports)))
    else:
        print(render(reports[0]) if len(reports) == 1 else comparison.compare(*reports))


@cli.command()
def plan(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="A plan file, or start reports: a miss, a hit.")],
    as_json: AsJson = False,
) -> None:
    """Say when a server is ready and how long first requests take, for each choice of buckets to warm."""
    from app import plan as planner
    from app import plan_file, plan_text

    found = plan_file.read(files)
    print(json.dumps(planner.document(found)) if as_json else plan_text.render(found))


def _teller(as_json: bool) -> Callable[[Any], None]:
    """Show stages on standard error, so that standard output holds the answer alone."""
    from app.console import line

    return lambda view: None if as_json or view.end_s is None else print(line(view), file=sys.stderr, flush=True)


def _finish(document: dict[str, Any], as_json: bool) -> None:
    import yaml

    print(json.dumps(document) if as_json else yaml.safe_dump(document, sort_keys=False, width=110).rstrip())
    sys.stdout.flush()
    os._exit(0)  # the device thread, a daemon, may not outlive the interpreter it is running in


def main() -> None:
    """Run the command line; a known error is told on standard error and becomes the exit code."""
    try:
        cli()
    except WarmgateError as error:
        shown = {"error": str(error), "kind": type(error).__name__, "exit_code": error.exit_code}
        print(json.dumps(shown) if "--json" in sys.argv else f"warmgate: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)


if __name__ == "__main__":
    main()
