"""Functions run by several processes that talk by gloo, as torchrun would start them."""

import faulthandler
import multiprocessing
import os
import socket
import sys

SECONDS = 300  # a child that takes longer shows where it stands, and ends

PRELOADED = ("litgrpo.modules.grpo", "litgrpo.modules.sft", "tests.support.training")


def run_by(number, function, *words):
    """Call `function(number, *words)` in `number` new processes.

    They are forked from one that has imported everything, which takes seconds. It is started once,
    by whichever test is first. The function must stand at the top of a module.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([*PRELOADED, function.__module__])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = [(rank, number, port, function, words) for rank in range(number)]
    children = [server.Process(target=child, args=each) for each in asked]
    for each in children:
        each.start()
    for each in children:
        each.join()
    assert [each.exitcode for each in children] == [0] * number


def child(rank, number, port, function, words):
    """Set the variables of torchrun, then call the function."""
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.stderr)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    here |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    here |= {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
    if number > 1:
        os.environ |= {name: str(value) for name, value in here.items()}
    function(number, *words)
