"""All comparisons one after the other, into one table: `make benchmarks`.

    python benchmarks/run.py [--only rollout gae] [--output benchmarks/results] [--repeats 7]

Each is also runnable alone, with more options. Run them on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import REPEATS, ROOT, Comparison, Report, markdown

THREADS = {"gae": 2, "logprob": 2, "vocab_parallel": 1, "layouts": 1, "roofline": 2, "bf16": 1, "rollout": 2,
           "ppo_step": 2}  # fmt: skip
"""The comparisons in the order in which they run, with the threads of a process."""


def main() -> None:
    """Run, collect, write ``results.md`` and ``results.json``."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=list(THREADS), default=list(THREADS))
    options.add_argument("--output", type=Path, default=ROOT / "runs" / "benchmarks", help="folder for the results")
    options.add_argument("--repeats", type=int, default=REPEATS)
    arguments = options.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    reports, failed = [], []
    for name in arguments.only:
        path = arguments.output / f"{name}.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), "--json", str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS[name]), "PYTHONPATH": str(ROOT)}
        print(f"== {name}", flush=True)
        status = subprocess.run([*command, "--repeats", str(arguments.repeats)], env=environment).returncode
        if status or not path.exists():
            failed.append(name)
            continue
        reports.append(read(path))
    if reports:
        (arguments.output / "results.md").write_text(markdown(reports) + "\n")
        everything = [report.as_json() for report in reports]
        (arguments.output / "results.json").write_text(json.dumps(everything, indent=1) + "\n")
        print(f"written to {arguments.output / 'results.md'}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def read(path: Path) -> Report:
    """The report that a benchmark wrote."""
    found = json.loads(path.read_text())
    rows = []
    for row in found["rows"]:
        row.pop("met")
        rows.append(Comparison(**{**row, "ours": tuple(row["ours"]), "peer": tuple(row["peer"])}))
    return Report(found["benchmark"], rows, found["machine"])


if __name__ == "__main__":
    main()
