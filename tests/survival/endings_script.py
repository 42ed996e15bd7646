"""Trains under guard in one forked process after the other, each of which ends in its own way.

python endings_script.py FOLDER NAME...    # prints how each ended, as JSON
"""

import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import fastguard
from fastguard.step.endings import when_terminated

HELD = []  # what a scenario keeps until Python ends


def guarded(path, *sinks):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = fastguard.wrap(torch.optim.SGD([p], lr=0.1), sinks=[fastguard.JsonlSink(path), *sinks])
    HELD.append(optimizer)
    return optimizer


def train(optimizer, num_steps=3):
    for _ in range(num_steps):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        optimizer.step()


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def exits(path):
    train(guarded(path))
    sys.exit(3)


def exits_at_once(path):
    train(guarded(path))
    os._exit(4)


def trains_in_a_thread(path):
    optimizer = guarded(path)
    threading.Thread(target=train, args=(optimizer,)).start()


def is_terminated(path):
    train(guarded(path))
    terminate()


def is_terminated_and_leaves_that_alone(path):
    os.environ["FASTGUARD_SIGTERM"] = "0"
    train(guarded(path))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    terminate()


def handles_sigterm_already(path):
    signal.signal(signal.SIGTERM, handler := lambda *_: sys.exit(5))
    train(guarded(path))
    assert signal.getsignal(signal.SIGTERM) is handler
    terminate()


def ignores_sigterm(path):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    optimizer = guarded(path)
    train(optimizer)
    terminate()
    train(optimizer)
    sys.exit(6)


def takes_sigterm_over_and_passes_it_on(path):
    """As trainers do that end at a good moment, and call the handler that was there before."""
    optimizer = guarded(path)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *arguments: before(*arguments))
    train(optimizer)
    terminate()
    train(optimizer)  # what else but the one who took over could know when to end
    sys.exit(7)


def is_terminated_while_a_sink_writes(path):
    def slow(record):
        if record.step == 1:
            terminate()
            done.append(record.step)

    class After:
        write = close = staticmethod(lambda *record: path.with_suffix(".after").write_text(str(done)))

    done = []
    p = torch.nn.Parameter(torch.ones(3))
    sinks = [slow, fastguard.JsonlSink(path), After()]
    HELD.append(optimizer := fastguard.wrap(torch.optim.SGD([p], lr=0.1), sinks=sinks))
    train(optimizer)


def is_terminated_twice_while_a_sink_hangs(path):
    def hangs(record):
        terminate()
        terminate()
        time.sleep(60)

    train(guarded(path, hangs))


def is_terminated_while_a_thread_trains(path):
    def body():
        while True:
            train(optimizer, 1)
            num_taken[0] += 1

    optimizer, num_taken = guarded(path), [0]
    when_terminated(lambda: path.with_suffix(".taken").write_text(str(num_taken[0])))
    threading.Thread(target=body, daemon=True).start()
    while num_taken[0] < 20:
        time.sleep(0.001)
    terminate()


def closes(path):
    first, second = guarded(path), guarded(path.with_suffix(".second"))
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    train(first)
    first.guard.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    HELD.clear()
    del second
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    fastguard.wrap(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # without sinks nothing is held back for anybody


def forks(path):
    optimizer = guarded(path)
    train(optimizer)
    if not (child := os.fork()):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        told = []
        logging.getLogger("fastguard").addHandler(handler := logging.Handler())
        handler.emit = lambda record: told.append(record.getMessage())
        train(optimizer, 5)
        optimizer.guard.flush()
        assert optimizer.guard.report().numbers["num_steps"] == 8
        optimizer.guard.close()
        assert len(told) == 1 and "this process was forked" in told[0], told
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    train(optimizer, 1)


def forks_by_multiprocessing(path):
    optimizer = guarded(path)
    train(optimizer)
    context = multiprocessing.get_context("fork")
    (process := context.Process(target=train, args=(optimizer, 5))).start()
    process.join()
    assert process.exitcode == 0
    for _ in range(5):  # at once: the signal may come while the child is being made
        (process := context.Process(target=time.sleep, args=(60,))).start()
        process.terminate()
        process.join()
        assert process.exitcode == -signal.SIGTERM


def forks_after_a_parallel_region(path):
    torch.set_num_threads(2)
    x = [torch.ones(1 << 20)]
    norm = fastguard.tensor_stats(x).total_norm()
    if not (child := os.fork()):
        signal.alarm(20)
        os._exit(fastguard.tensor_stats(x).total_norm() != norm)
    assert os.waitpid(child, 0)[1] == 0
    train(guarded(path))


def main():
    folder, ended = Path(sys.argv[1]), {}
    p = torch.nn.Parameter(torch.ones(3))
    train(fastguard.wrap(torch.optim.SGD([p], lr=0.1)))  # what torch imports at a first step is there for all
    gc.freeze()  # else each child goes through all of torch's objects as it ends
    for scenario in map(globals().__getitem__, sys.argv[2:]):
        child = os.fork()
        if not child:
            sys.stderr = open(folder / f"{scenario.__name__}.stderr", "w")  # noqa: SIM115 - until the process ends
            return scenario(folder / scenario.__name__)
        ended[scenario.__name__] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(ended))
    return None


if __name__ == "__main__":
    main()
