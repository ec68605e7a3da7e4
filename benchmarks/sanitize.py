"""What compute-sanitizer says of a kernel: `python benchmarks/sanitize.py KERNEL...`.

Runs memcheck, racecheck and initcheck over small problems and writes one log a kernel, `sanitizer_<kernel>.txt`, with
the code that was watched, the machine and each tool's own summary. Exit status 1 if a tool reports an error, does not
end or says nothing, 2 if there is nothing to run it with.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from numba_attn import launch, versions
from numba_attn.bench.digest import code_digest
from numba_attn.bench.problems import parse
from numba_attn.bench.torch_backends import cuda_torch
from numba_attn.cli.errors import CommandError
from numba_attn.cli.kernel_file import KERNEL_HELP, find
from numba_attn.kernel import Kernel
from numba_attn.problem import Device

ROOT = Path(__file__).resolve().parents[1]
NOTES = ROOT / "docs" / "notes"
PROGRAM = "compute-sanitizer"
# torch asks for what a driver may not have, and copes.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": (), "initcheck": ("--report-api-errors", "no")}
PROBLEMS = (
    "b1_h2_q70_k130_d64",
    "b2_h1_q65_k100_d64_causal",
    "b1_h2_q100_k77_d80_v96",
    "b1_h1_q130_k150_d128",
    "b1_h2_q129_k129_d128_causal",
    "b1_h1_q67_k70_d256",
    "b1_h1_q40_k99_d256_causal",
    "b1_h1_q33_k70_d300",
    "b1_h2_q3_k300_d61_v35",
    "b1_h1_q37_k7_d5_v3_causal",
)
"""Tails in every length, several tiles of keys, each of the tile shapes, few queries, few keys, odd columns."""
LIMIT_S = 900
ERROR_CODE = 86
SHOWN = 60  # lines of a report with errors

_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+", metavar="KERNEL", help=KERNEL_HELP)
    parser.add_argument("--problem", action="append", metavar="NAME", help="like b1_h2_q70_k130_d64_causal")
    parser.add_argument("--out", type=Path, default=NOTES, metavar="FOLDER", help="where the logs go; docs/notes")
    args = parser.parse_args(argv)
    try:
        names = args.problem or PROBLEMS
        for name in names:
            parse(name)
        kernels = {text: find(text)[0] for text in args.kernels}
    except (ValueError, CommandError) as error:
        parser.error(str(error))
    if why_not := missing():
        print(f"sanitize: {why_not}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = [sanitized(kernel, text, names, args.out) for text, kernel in kernels.items()]
    return 0 if all(results) else 1


def missing() -> str | None:
    """What is not there to run the tools with."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not on the PATH: it comes with the CUDA toolkit"
    return cuda_torch()[1]


def sanitized(kernel: Kernel, text: str, names, folder: Path) -> bool:
    """Run the tools over one kernel and write its log; whether none reports an error."""
    device = launch.device_facts(0)
    lines = [*head(kernel, device), "", "problems"]
    served = []
    for name in names:
        reason = kernel.supports(parse(name), device)
        lines.append(f"  {name}: {f'not served: {reason}' if reason else code_digest(kernel, parse(name), device)}")
        served += [] if reason else [name]
    fine = bool(served)
    for tool in TOOLS if served else ():
        code, output = watched(tool, text, served)
        count = errors(output)
        good = code == 0 and count == 0
        fine = fine and good
        lines += ["", tool, *(f"  {line}" for line in summary(output))]
        if not good:
            lines += [f"  exit code {code}, {'no' if count is None else count} errors in the summary", *tail(output)]
        print(f"{kernel.name} {tool}: {'no errors' if good else 'FAILED'}", flush=True)
    log = folder / f"sanitizer_{kernel.name}.txt"
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{log} written")
    return fine


def head(kernel: Kernel, device: Device) -> list[str]:
    driver = launch.driver_version()
    done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=False)
    facts = {
        "kernel": kernel.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": f"{device.name}, {device.arch}, driver serves CUDA {'.'.join(map(str, driver)) if driver else '?'}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.report().items()),
        "tool": next((line for line in done.stdout.splitlines() if "ersion" in line), PROGRAM).strip(),
    }
    return [f"{name}: {fact}" for name, fact in facts.items()]


def watched(tool: str, kernel: str, names) -> tuple[int, str]:
    """Exit code and output of one tool over the problems."""
    program = [sys.executable, str(ROOT / "benchmarks" / "attend.py"), "--check", kernel, *names]
    command = [PROGRAM, "--tool", tool, *TOOLS[tool], "--error-exitcode", str(ERROR_CODE), *program]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        # Each tensor is an allocation of its own, so that accesses beside it are seen.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout or ""  # bytes, whatever was asked for
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        return -1, f"{said}\nnot done after {LIMIT_S} s"
    return done.returncode, done.stdout


def summary(output: str) -> list[str]:
    """The tool's own lines that sum up."""
    return [line for line in output.splitlines() if line.startswith("=========") and "SUMMARY" in line]


def errors(output: str) -> int | None:
    """Errors that the summaries count; None without a summary."""
    found = _ERRORS.findall(output)
    return sum(int(a or b) for a, b in found) if found else None


def tail(output: str) -> list[str]:
    """The beginning of what the tool reports, or the end of what was said without it."""
    lines = output.splitlines()
    reported = [line for line in lines if line.startswith("=========")]
    return [f"  | {line}" for line in (reported[:SHOWN] if len(reported) > 2 else lines[-SHOWN:])]


if __name__ == "__main__":
    sys.exit(main())
