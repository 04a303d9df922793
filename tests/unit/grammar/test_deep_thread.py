import subprocess
import sys
import threading

import pytest

from specinfer.grammar.library_vocabulary import DeepThread

STACK = 1 << 26


@pytest.fixture
def set_to(monkeypatch):
    """The sizes given to the process-wide setting, in order."""
    found, set_stack_size = [], threading.stack_size

    def recorded(*size):
        found.extend(size)
        return set_stack_size(*size)

    monkeypatch.setattr(threading, "stack_size", recorded)
    return found


def at_once(count, work):
    """Run work(0), work(1), ... on threads that begin together."""
    together = threading.Barrier(count)

    def run(number):
        together.wait()
        work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_all_calls_run_on_one_thread_whoever_makes_them(set_to):
    usual, deep, ran_on, results = threading.stack_size(), DeepThread("deep", STACK), set(), {}

    def work(number):
        def task():
            ran_on.add(threading.current_thread())
            return number

        results[number] = deep.run(task)

    at_once(8, work)
    assert results == {number: number for number in range(8)}
    assert len(ran_on) == 1
    assert ran_on < set(threading.enumerate()), "it waits for more"
    assert set_to == [STACK, usual], "set around one start, and put back"
    assert deep.run(threading.stack_size) == usual


@pytest.mark.parametrize("error", [ValueError("bad"), MemoryError(), KeyboardInterrupt()])
def test_exceptions_come_back_as_themselves_and_the_thread_goes_on(error):
    deep = DeepThread("deep", STACK)

    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        deep.run(fail)
    assert caught.value is error
    assert deep.run(lambda: 3) == 3


PROGRAM = f"""
import ctypes, os
from specinfer.grammar.library_vocabulary import DeepThread

deep = DeepThread("deep", {STACK})

def stack():
    libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(64), ctypes.c_size_t()
    libc.pthread_self.restype = ctypes.c_void_p
    libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), attributes)
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    return size.value

assert deep.run(stack) >= {STACK}, deep.run(stack)
child = os.fork()
if child == 0:
    assert deep.run(lambda: 3) == 3
    print("child", end=" ", flush=True)
else:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print("parent", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc for the size of a stack")
def test_the_stack_is_deep_a_fork_has_its_own_and_the_process_ends():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "child parent\n", "")
