"""What runs in a worker process (isolated.py): load a file, say "ready", read a question, lower the limits, answer.

Run as a file, in isolated mode, with the path of a file that defines `answer(question) -> str`. Neither may import
anything of this package: in isolated mode it is not to be found, and a file here may be called as a library is.
"""

import json
import math
import resource
import runpy
import sys


def limit(memory_bytes: int, cpu_seconds: float) -> None:
    """Lower the limits of this process for good; the processor time is from now on."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    seconds = math.ceil(used + cpu_seconds) + 1
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.excepthook = lambda kind, error, trace: print(f"{kind.__name__}: {error}"[:200])
    answer = runpy.run_path(sys.argv[1])["answer"]
    print("ready", flush=True)
    question = json.loads(sys.stdin.read())
    limit(question["memory_bytes"], question["cpu_seconds"])
    print(answer(question))
