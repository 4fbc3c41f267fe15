"""Run Python programs, each in a fork of this process, so that what takes long to import is imported once.

    python -P run_in_forks.py MODULE-OR-SCRIPT …

imports the modules, or scripts, these not as `__main__`. Every line of standard input is JSON, [folder, output, words]:
the module or the script words[0] runs in the folder, whose packages come before all others, and writes to the file
`output`. Its exit code is printed.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import traceback


def run(folder: str, output: str, words: list[str]) -> int:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = words
    try:
        if words[0].endswith(".py"):
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module(words[0], run_name="__main__")
        return 0
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


for name in sys.argv[1:]:
    if name.endswith(".py"):
        runpy.run_path(name)
    else:
        importlib.import_module(name)
# Collecting garbage would touch, and so copy in every fork, all that is imported.
gc.collect()
gc.freeze()
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os._exit(run(*json.loads(line)))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
