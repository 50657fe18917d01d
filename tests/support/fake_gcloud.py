"""A stand-in for the gcloud that run_tpu_xla.sh calls: folders of this machine play the workers of a TPU VM.

Each worker's folder is its home; the real remote command runs there, in a shell of its own with a login's few
variables. As with sshd, a command ends when nobody holds its output any more, and what it left in its session
is hung up on and killed. An unknown argument is an error, so that a misspelt flag does not pass.

Its folder is FAKE_GCLOUD: state.json {account, name, state, addresses, environment, unreachable}, a line per
call in calls.txt, and worker_0, worker_1 ...
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

FOLDER = Path(os.environ["FAKE_GCLOUD"])
SSH_FAILED = 255


def fail(text: str) -> NoReturn:
    print(f"ERROR: (gcloud) {text}", file=sys.stderr)
    sys.exit(1)


def parser(alpha: bool) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="gcloud", allow_abbrev=False)
    below = top.add_subparsers(dest="group", required=True)
    accounts = below.add_parser("auth").add_subparsers(dest="verb", required=True).add_parser("list")
    accounts.add_argument("--filter", choices=["status:ACTIVE"], required=True)
    accounts.add_argument("--format", choices=["value(account)"], required=True)
    compute = below.add_parser("compute").add_subparsers(required=True)
    tpus = compute.add_parser("tpus").add_subparsers(required=True)
    verbs = tpus.add_parser("tpu-vm").add_subparsers(dest="verb", required=True)
    describe = verbs.add_parser("describe", allow_abbrev=False)
    describe.add_argument("tpu")
    expected = "value(state,networkEndpoints[].ipAddress.list())"
    describe.add_argument("--format", choices=[expected], required=True)
    ssh = verbs.add_parser("ssh", allow_abbrev=False)
    ssh.add_argument("tpu")
    ssh.add_argument("--command", required=True)
    ssh.add_argument("--ssh-flag")
    scp = verbs.add_parser("scp", allow_abbrev=False)
    scp.add_argument("sources", nargs="+")
    scp.add_argument("target")
    for verb in (ssh, scp):
        way = verb.add_mutually_exclusive_group()
        way.add_argument("--internal-ip", action="store_true")
        if alpha:  # as in gcloud 528
            way.add_argument("--tunnel-through-iap", action="store_true")
        verb.add_argument("--worker", type=int, required=True)
    for verb in (describe, ssh, scp):
        verb.add_argument("--quiet", action="store_true", required=True)
        verb.add_argument("--zone")
        verb.add_argument("--project")
    return top


def run_there(command: str, home: Path, environment: dict[str, str]) -> int:
    """What sshd does with a command: a session without a terminal, over when its output is closed."""
    login = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", **environment}
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=home,
        env=login,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    code = process.wait()
    for number in (signal.SIGHUP, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    return code


def main() -> int:
    alpha = sys.argv[1] == "alpha"
    args = parser(alpha).parse_args(sys.argv[1 + alpha :])
    with (FOLDER / "calls.txt").open("a") as file:
        file.write(" ".join(sys.argv[1:]) + "\n")
    state: dict[str, Any] = json.loads((FOLDER / "state.json").read_text())
    if args.group == "auth":
        print(state["account"])
        return 0
    if args.verb == "scp":
        name, _, path = args.target.partition(":")
    else:
        name = args.tpu
    if name != state["name"]:
        fail(f"NOT_FOUND: Resource 'nodes/{name}' was not found")
    if args.verb == "describe":
        print(state["state"], ",".join(state["addresses"]), sep="\t")
        return 0
    print(f"SSH: Attempting to connect to worker {args.worker}...", file=sys.stderr)
    if args.worker in state["unreachable"]:
        print("ERROR: (gcloud) [/usr/bin/ssh] exited with return code [255].", file=sys.stderr)
        return SSH_FAILED
    home = FOLDER / f"worker_{args.worker}"
    if args.verb == "scp":
        for source in args.sources:
            shutil.copy(source, home / path)
        return 0
    code = run_there(args.command, home, state["environment"])
    if code:
        print(f"ERROR: (gcloud) Remote command failed with {code}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
