"""Claude Code, Codex, opencode and Qwen Code, each in a session of two turns against the real server.

python -m tools.agents [--agent NAME]... [--keep]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tools.agents.check import Check, judge_http, judge_log, run_turns
from tools.agents.clients import CLIENTS, Client, Place
from tools.agents.install import install
from tools.agents.longer import longer
from tools.agents.relay import Relay
from tools.agents.server import running

_REPOSITORY = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run the agents; 0 if every check of each passed."""
    given = _parse(arguments)
    programs = install(given.folder)
    artifact = longer(given.model, given.context, given.folder)
    run = Path(tempfile.mkdtemp(prefix="ninfer-agents-"))
    passed = True
    try:
        for client in CLIENTS:
            if _wanted(client, given.agent or []):
                began = time.monotonic()
                checks = _session(client, artifact, programs, run / client.name, given)
                passed &= _report(client.name, checks, time.monotonic() - began)
    except BaseException:
        passed = False
        raise
    finally:
        if given.keep or not passed:
            print(f"Logs, settings and all bytes exchanged are in {run}")
        else:
            shutil.rmtree(run, ignore_errors=True)
    return 0 if passed else 1


def _session(
    client: Client, artifact: Path, programs: Path, folder: Path, given: argparse.Namespace
) -> list[Check]:
    """One agent, with a server of its own, so that no other's prompts are in the cache."""
    home, work = folder / "home", folder / "work"
    home.mkdir(parents=True)
    work.mkdir()
    with running(artifact, given.context, client.model or "ninfer-scripted", folder) as server:
        relay = Relay(server.port)
        try:
            place = Place(home, f"http://127.0.0.1:{relay.port}", server.key, server.model, given.context)
            checks = run_turns(client, place, work, programs, given.seconds)
        finally:
            relay.close()
            relay.save(folder / "http")
    return [*checks, *judge_http(relay.exchanges), *judge_log(server.records(), client.reused)]


def _wanted(client: Client, names: list[str]) -> bool:
    return client.name in names or "all" in names or (not names and not client.also)


def _report(name: str, checks: list[Check], seconds: float) -> bool:
    passed = all(check.passed for check in checks)
    print(f"{name}: {'passed' if passed else 'FAILED'} in {seconds:.0f} s")
    for check in checks:
        print(f"  {'ok  ' if check.passed else 'FAIL'} {check.name:<28} {' '.join(check.found.split())}")
    sys.stdout.flush()
    return passed


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.agents", description=__doc__)
    parser.add_argument(
        "--agent",
        action="append",
        choices=["all", *(client.name for client in CLIENTS)],
        help="may be repeated; without it each agent in its usual way, with `all` in the others too",
    )
    parser.add_argument("--keep", action="store_true", help="keep logs and exchanges also after success")
    parser.add_argument("--model", type=Path, default=_REPOSITORY / "models/ninfer-nano.ninfer")
    parser.add_argument("--context", type=int, default=65536, help="tokens; agents ask for answers of 32,000")
    parser.add_argument("--seconds", type=float, default=300, help="limit of one turn")
    parser.add_argument(
        "--folder", type=Path, default=_REPOSITORY / "build/agents", help="where npm installs the agents"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
