"""PyTorch's side of the measurement: `passing.py STRATEGY SECONDS`.

Prints batches a second, median latency and worst latency in microseconds. The producer makes each
batch in shared memory directly, with one copy out of private memory, which is the cheapest way
that PyTorch has (sending a private tensor would copy it once more); two processes, a few batches
on their way, first batches not counted: the same work as in `passing.rs`.
"""

import sys
import time

import torch
import torch.multiprocessing as mp

BATCH = 1 << 20
AHEAD = 4
WARM_UP = 32


def make(source):
    """One copy: from private memory into a new shared storage."""
    storage = torch.UntypedStorage._new_shared(BATCH)
    batch = torch.empty(0, dtype=torch.uint8).set_(storage)
    batch.copy_(source)
    return batch


def consume(strategy, batches, answers, room, one_by_one):
    mp.set_sharing_strategy(strategy)
    torch.set_num_threads(1)
    answers.put(0)
    while True:
        batch = batches.get()
        if batch is None:
            answers.put(0)
            return
        assert int(batch[0]) == 7 and int(batch[-1]) == 7
        del batch
        room.release()
        if one_by_one:
            answers.put(0)


def run(strategy, seconds, one_by_one):
    context = mp.get_context("spawn")
    # A simple queue has no feeder thread: the quickest that multiprocessing has for one producer.
    batches, answers = context.SimpleQueue(), context.SimpleQueue()
    room = context.Semaphore(AHEAD)
    arguments = (strategy, batches, answers, room, one_by_one)
    consumer = context.Process(target=consume, args=arguments)
    consumer.start()
    answers.get()
    source = torch.full((BATCH,), 7, dtype=torch.uint8)
    recent = []

    def send():
        room.acquire()
        batch = make(source)
        batches.put(batch)
        # A sent storage must live until the consumer has it.
        recent.append(batch)
        if len(recent) > 2 * AHEAD:
            recent.pop(0)

    for _ in range(WARM_UP):
        send()
        if one_by_one:
            answers.get()
    times, sent, begin = [], 0, time.perf_counter()
    while time.perf_counter() - begin < seconds or (one_by_one and len(times) < 10):
        start = time.perf_counter()
        send()
        if one_by_one:
            answers.get()
            times.append((time.perf_counter() - start) * 1e6)
        sent += 1
    batches.put(None)
    answers.get()
    rate = sent / (time.perf_counter() - begin)
    consumer.join()
    return rate, sorted(times)


def main():
    strategy, seconds = sys.argv[1], float(sys.argv[2])
    torch.set_num_threads(1)
    mp.set_sharing_strategy(strategy)
    rate, _ = run(strategy, seconds, one_by_one=False)
    _, times = run(strategy, seconds, one_by_one=True)
    print(rate, times[len(times) // 2], times[-1])


if __name__ == "__main__":
    main()
