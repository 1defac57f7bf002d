"""How long `import rtk` takes in a fresh interpreter, beside the parts that it cannot do without.

python benchmarks/import_time.py
"""

import statistics
import subprocess
import sys
import time

RUNS = 7
STATEMENTS = ("pass", "import numpy", "import aiohttp", "import numpy, aiohttp", "import rtk")


def seconds(statement: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - begin


def main() -> None:
    for statement in STATEMENTS:
        seconds(statement)  # fills the file cache and writes the byte code
    times: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for _ in range(RUNS):
        for statement in STATEMENTS:
            times[statement].append(seconds(statement))
    for statement in STATEMENTS:
        print(f"{statement:22} median {statistics.median(times[statement]):.3f} s of {RUNS} interpreters")


if __name__ == "__main__":
    main()
