"""How long until the first token: `ninfer` from a cold process, against `import torch` alone, in one run.

    python -m bench.startup --artifact models/smollm2-135m-instruct.ninfer [--rounds 5]

Each round runs, one after the other, `python -c "import torch"`, `python -c "import ninfer"` and a one-token
answer; the time of the answer is taken at the first byte on stdout. Caches are warm: one unmeasured answer
comes first. Prints the median of each and the ratio of the medians.
"""

import argparse
import statistics
import subprocess
import sys
import time


def seconds_to_exit(code: str) -> float:
    """Wall time of `python -c code`."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def seconds_to_first_byte(command: list[str]) -> float:
    """Wall time from starting `command` to its first byte on stdout."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode != 0 or not first:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    answer = [sys.executable, "-m", "ninfer.cli.main", arguments.artifact]
    answer += ["--prompt", "Name a colour.", "--max-new", "1", "--greedy"]
    seconds_to_first_byte(answer)
    torch_times, ninfer_times, answer_times = [], [], []
    for _ in range(arguments.rounds):
        torch_times.append(seconds_to_exit("import torch"))
        ninfer_times.append(seconds_to_exit("import ninfer"))
        answer_times.append(seconds_to_first_byte(answer))
    torch_time, answer_time = statistics.median(torch_times), statistics.median(answer_times)
    print(f"{'import torch':<28}{torch_time:6.2f} s")
    print(f"{'import ninfer':<28}{statistics.median(ninfer_times):6.2f} s")
    print(f"{'ninfer, first token':<28}{answer_time:6.2f} s")
    print(f"{'ratio to import torch':<28}{answer_time / torch_time:6.2f}   (at most 2)")


if __name__ == "__main__":
    main()
