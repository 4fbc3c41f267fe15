"""Run Python programs, each in forks of this process, so that what takes long to import is imported once.

    python -P run_in_forks.py MODULE-OR-SCRIPT …

imports the modules, or scripts, these not as `__main__`. Every line of standard input is JSON, [folder, output, words,
processes, environment]: the module or the script words[0] runs in the folder, whose packages come before all others,
and writes to the file `output`. It runs in one process, or in several that find each other as those of torchrun do;
when one of them fails, the others are ended. The processes' ids are printed, then the exit code: the first that is
not 0.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback


def run(folder: str, output: str, words: list[str], environment: dict[str, str]) -> int:
    # A shell's background jobs ignore Ctrl-C, and so would what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    os.environ.update(environment)
    sys.path.insert(0, folder)
    sys.argv = words
    try:
        if words[0].endswith(".py"):
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        # As at the end of an interpreter.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


def places(processes: int) -> list[dict[str, str]]:
    """What torchrun tells each of several processes."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    return [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


for name in sys.argv[1:]:
    if name.endswith(".py"):
        runpy.run_path(name)
    else:
        importlib.import_module(name)
# Collecting garbage would touch, and so copy in every fork, all that is imported.
gc.collect()
gc.freeze()
for line in sys.stdin:
    *arguments, processes, environment = json.loads(line)
    children = set()
    for place in places(processes):
        child = os.fork()
        if child == 0:
            os._exit(run(*arguments, environment | place))
        children.add(child)
    print(*children, flush=True)
    code = 0
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in children:
                os.kill(other, signal.SIGTERM)
    print(code, flush=True)
