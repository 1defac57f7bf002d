"""The decoders' fuzz tests with many more examples, new ones each time.

python benchmarks/fuzz.py [examples of each test, 20000 where left out] [seed]
"""

import os
import re
import subprocess
import sys
import time

TIMEOUT_S = 3600


def main() -> None:
    examples = sys.argv[1] if len(sys.argv) > 1 else "20000"
    seed = sys.argv[2] if len(sys.argv) > 2 else str(time.time_ns() % 10**6)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/client/test_fuzz.py"]
    begin = time.perf_counter()
    run = subprocess.run(
        [*command, f"--hypothesis-seed={seed}", "--hypothesis-show-statistics"],
        env=os.environ | {"RTK_FUZZ_EXAMPLES": examples},
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    counts = [int(found) for found in re.findall(r"- (\d+) passing", run.stdout)]
    print(run.stdout if run.returncode else f"{sum(counts)} examples in {len(counts)} tests")
    print(f"seed {seed}, {time.perf_counter() - begin:.0f} s: {'FAILED' if run.returncode else 'passed'}")
    sys.exit(run.returncode)


if __name__ == "__main__":
    main()
