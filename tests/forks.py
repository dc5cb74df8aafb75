"""Code that needs a process of its own gets a fork of one that has imported what is slow to import.

with Forks("benchmarks.step, benchmarks.online") as forks:
    print(forks.run("from benchmarks.online import main\\nassert main([]) == 0"))
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from typing import Any, Self

from tests.children import ROOT, environment


class Forks:
    """A process that waits for code and forks for each piece. ``imports``: modules; ``variables``: of its environment."""

    def __init__(self, imports: str, **variables: str):
        command = [sys.executable, "-W", "ignore", "-c", f"import {imports}\nfrom tests.forks import serve\nserve()"]
        there = environment(OMP_NUM_THREADS="1", **variables)
        self._process = subprocess.Popen(command, env=there, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, code: str) -> str:
        """What the code has printed; its fork must end well."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "what is imported for all cannot be imported"
        status, output = json.loads(line)
        assert status == 0, output[-3000:]
        return str(output)

    def run_module(self, name: str) -> str:
        """What ``python -m name`` has printed."""
        return self.run(f"import runpy\nrunpy.run_module({name!r}, run_name='__main__')")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._process.communicate()  # closes its input, at whose end it ends


def serve() -> None:
    """The loop of the process that forks."""
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _run(json.loads(line), writing)
        os.close(writing)
        with open(reading, encoding="utf-8", errors="replace") as output:
            printed = output.read()
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed]), flush=True)
    os._exit(0)  # to take torch down in order would take a second


def _run(code: str, output: int) -> None:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        exec(compile(code, "<a fork>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
