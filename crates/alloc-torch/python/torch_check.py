"""Trains with PyTorch's own allocator and with ours, compares, and tries what trips allocators up.

    python3 torch_check.py [--library liballoc_torch.so] [--steps 20] [--require-gpu] [word ...]

Prints a `test NAME ... ok|FAILED|skipped` line for each test, and a table. Exits with 1 if a test
failed, with 77 if there is no GPU or no PyTorch. Each part runs in a process of its own, since the
allocator of a process cannot be changed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
NO_GPU = 77
CONFIGURATIONS = {
    "torch": {"allocator": "torch"},
    "torch, expandable": {
        "allocator": "torch",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    },
    "ours": {"allocator": "ours"},
    "ours, expandable": {"allocator": "ours", "GPU_ALLOC_CONF": "expandable_segments:True"},
    "ours as pytorch": {"allocator": "ours", "GPU_ALLOC_POLICY": "pytorch"},
}


def gpt(torch):
    """A small GPT with plain attention, and batches of varying length."""
    nn, functional = torch.nn, torch.nn.functional
    width, heads, layers, vocabulary = 384, 6, 6, 512

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, heads, width // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(-2, -1)) * (width // heads) ** -0.5
            mask = torch.ones(length, length, device=x.device, dtype=torch.bool).tril()
            weights = weights.masked_fill(~mask, float("-inf")).softmax(-1)
            mixed = (weights @ v).transpose(1, 2).reshape(batch, length, width)
            x = x + self.out(mixed)
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.head = nn.Linear(width, vocabulary)

        def forward(self, tokens):
            places = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.tokens(tokens) + self.places(places)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Gpt().cuda()
    generator = torch.Generator().manual_seed(1)

    def loss(step):
        length = 128 + 32 * (step * 5 % 9)
        tokens = torch.randint(vocabulary, (16, length + 1), generator=generator).cuda()
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, vocabulary), tokens[:, 1:].reshape(-1))

    return model, loss


def resnet(torch):
    """ResNet-50 on noise, with the one layer replaced whose gradient is not reproducible."""
    import torchvision

    model = torchvision.models.resnet50(num_classes=100)
    model.maxpool = torch.nn.AvgPool2d(3, 2, 1)
    model = model.cuda()
    generator = torch.Generator().manual_seed(2)

    def loss(step):
        images = torch.randn(32, 3, 128, 128, generator=generator).cuda(non_blocking=True)
        labels = torch.randint(100, (32,), generator=generator).cuda()
        return torch.nn.functional.cross_entropy(model(images), labels)

    return model, loss


def train(name, steps, ours):
    import torch

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    model, loss_of = {"gpt": gpt, "resnet": resnet}[name](torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, times = [], []
    for step in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = loss_of(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
    if ours:
        ours.check()
        peak = ours.stats()["reserved_bytes.all.peak"]
        allocated = ours.stats()["allocated_bytes.all.peak"]
    else:
        peak, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    # The first steps load kernels.
    step_ms = statistics.median(times[steps // 4 :])
    return {
        "losses": [loss.hex() for loss in losses],
        "last_loss": losses[-1],
        "step_ms": step_ms,
        "reserved_peak": peak,
        "allocated_peak": allocated,
    }


def check_side_streams(torch, ours):
    """Tensors made on one stream and read on others, freed while the reading is still queued."""
    main, sides = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(4)]
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    counts = [torch.zeros((), device="cuda", dtype=torch.int64) for _ in sides]
    for round_ in range(400):
        side = round_ % len(sides)
        value = float(round_)
        tensor = torch.full((1 + 7919 * round_ % 300_000,), value, device="cuda")
        sides[side].wait_stream(main)
        with torch.cuda.stream(sides[side]):
            for _ in range(3):
                counts[side] += (tensor != value).sum()
        tensor.record_stream(sides[side])
        del tensor
    for side, count in zip(sides, counts):
        main.wait_stream(side)
        wrong += count
    assert wrong.item() == 0, f"{wrong.item()} values were overwritten too early"


def check_autograd_on_side_streams(torch, ours):
    """Forward and backward passes on a side stream, from several threads."""
    import threading

    failures = []

    def work(number):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                generator = torch.Generator().manual_seed(number)
                x = torch.randn(64, 256, generator=generator).cuda()
                w = torch.randn(256, 256, generator=generator).cuda().requires_grad_()
                expected = None
                for _ in range(30):
                    w.grad = None
                    torch.tanh(x @ w).square().sum().backward()
                    stream.synchronize()
                    grad = w.grad.clone()
                    if expected is None:
                        expected = grad
                    assert torch.equal(grad, expected), "another gradient from the same inputs"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def check_out_of_memory(torch, ours):
    """Too much raises, says so, and leaves everything usable."""
    free, total = torch.cuda.mem_get_info()
    kept = torch.arange(1_000_000, device="cuda")
    for _ in range(2):
        try:
            torch.empty(2 * total, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            assert "out of memory" in str(error), error
        else:
            raise AssertionError("more than the device has was granted")
    blocks = []
    try:
        while len(blocks) < 10_000:
            blocks.append(torch.empty(total // 64, dtype=torch.uint8, device="cuda"))
    except RuntimeError as error:
        assert "out of memory" in str(error), error
    assert len(blocks) > free // (total // 64) - 4, len(blocks)
    del blocks
    # What is cached in pieces must become one.
    large = torch.empty(free // 2, dtype=torch.uint8, device="cuda")
    del large
    torch.cuda.empty_cache()
    assert kept.sum().item() == 499_999_500_000
    after, _ = torch.cuda.mem_get_info()
    assert after > free - (512 << 20), "memory was not given back"


def check_memory_fraction(torch, ours):
    """A limit holds, and lifting it lifts it."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.05)
    try:
        torch.empty(total // 10, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        assert "out of memory" in str(error), error
    else:
        raise AssertionError("the limit did not hold")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del_me = torch.empty(total // 10, dtype=torch.uint8, device="cuda")
    del del_me


def check_graphs(torch, ours):
    """A captured graph still finds its memory after the program has allocated and freed a lot."""
    source = torch.zeros(1_000_000, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (source * 2 + 1).sqrt()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = source * 2 + 1
        result = between.sqrt()
        del between
    for value in range(20):
        source.fill_(float(value))
        junk = [torch.full((1_000_000,), -1.0, device="cuda") for _ in range(5)]
        graph.replay()
        expected = (2 * float(value) + 1) ** 0.5
        assert torch.allclose(result, torch.full_like(result, expected)), value
        del junk
    del graph, result
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def check_graph_of_a_training_step(torch, ours):
    """A whole training step as a graph learns what the same steps learn one by one."""

    def run(captured):
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Dropout(0.0), torch.nn.Linear(512, 10)
        ).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(4)
        batches = [
            (torch.randn(64, 256, generator=generator), torch.randint(10, (64,), generator=generator))
            for _ in range(15)
        ]
        data, labels = torch.zeros(64, 256, device="cuda"), torch.zeros(64, device="cuda", dtype=torch.int64)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.cross_entropy(model(data), labels)
            loss.backward()
            optimizer.step()
            return loss

        def feed(batch):
            data.copy_(batch[0])
            labels.copy_(batch[1])

        losses = []
        # The first steps make the optimizer's state; on a side stream, as a capture needs.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for batch in batches[:3]:
                feed(batch)
                losses.append(step().item())
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                static_loss = step()
        for batch in batches[3:]:
            feed(batch)
            # Eager work in between takes and frees what it can get.
            junk = [torch.full((300_000,), -7.0, device="cuda") for _ in range(8)]
            if captured:
                graph.replay()
                losses.append(static_loss.item())
            else:
                losses.append(step().item())
            del junk
        return losses

    eager, replayed = run(False), run(True)
    wrong = [(a, b) for a, b in zip(eager, replayed) if abs(a - b) > 1e-4 * abs(a)]
    assert not wrong, f"{len(wrong)} of {len(eager)} losses differ: {wrong[:3]}"
    torch.cuda.empty_cache()


def check_graphs_that_share_a_pool(torch, ours):
    """Graphs of one pool, replayed in turn, use the same memory; all of it comes back in the end."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = ours.stats()["reserved_bytes.all.current"] if ours else 0
    source = torch.zeros(4_000_000, device="cuda")
    graphs, results = [], []
    for factor in range(1, 4):
        graph = torch.cuda.CUDAGraph()
        pool = {"pool": graphs[0].pool()} if graphs else {}
        with torch.cuda.graph(graph, **pool):
            between = source * factor
            results.append((between + 1).sum())
            del between
        graphs.append(graph)
    for value in range(10):
        source.fill_(float(value))
        for factor, (graph, result) in enumerate(zip(graphs, results), 1):
            graph.replay()
            expected = 4_000_000 * (factor * value + 1)
            assert abs(result.item() - expected) <= 1e-3 * expected, (value, factor, result.item())
    del source, graphs, results, graph, result
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if ours:
        after = ours.stats()["reserved_bytes.all.current"]
        assert after <= before + (4 << 20), f"{after - before} bytes were kept"


def check_failed_captures(torch, ours):
    """After a capture that fails, everything works, captures included."""
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                inside = torch.full((1_000_000,), 1.0, device="cuda")
                inside.sum().item()
        except RuntimeError:
            pass
        else:
            raise AssertionError("waiting inside a capture must fail")
        del graph
        torch.cuda.synchronize()
        assert torch.ones(1_000_000, device="cuda").sum().item() == 1_000_000
    check_graphs(torch, ours)


def two_streams(torch, ours):
    """Reserved and live bytes of a capture whose blocks are used on two streams in turn."""
    reserved = lambda: ours.stats()["reserved_bytes.all.current"] if ours else torch.cuda.memory_reserved()
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    bytes_each = 20 << 20
    # PyTorch allocates some bytes for its random numbers when a capture begins: not the graph's memory.
    with torch.cuda.stream(main):
        small = torch.empty(8, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, stats_before = reserved(), ours.stats() if ours else {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        for _ in range(20):
            blocks = [torch.empty(bytes_each, dtype=torch.uint8, device="cuda") for _ in range(2)]
            for block in blocks:
                block.fill_(1)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for block in blocks:
                    block.add_(1)
                    block.record_stream(side)
            del blocks, block
            main.wait_stream(side)
    taken = reserved() - before
    changed = {
        name: value - stats_before[name]
        for name, value in (ours.stats() if ours else {}).items()
        if name.endswith("current") and value != stats_before[name]
    }
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    del small
    return {"reserved": taken, "live": 2 * bytes_each, "changed": changed}


def mem_pool(torch, library):
    """PyTorch's own allocator with a torch.cuda.MemPool whose segments come from the library."""
    import gpu_alloc

    torch.zeros(1, device="cuda")
    pool = gpu_alloc.mem_pool(library)
    held = lambda: gpu_alloc.stats()["allocated_bytes.all.current"]
    assert held() == 0
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.full((1_000_000,), float(n), device="cuda") for n in range(12)]
        small = torch.ones(1000, device="cuda")
    outside = torch.ones(5_000_000, device="cuda")
    segments = held()
    assert segments >= 50_000_000, f"only {segments} bytes are the library's"
    assert all(tensor.eq(float(n)).all().item() for n, tensor in enumerate(tensors))
    gpu_alloc.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        result = tensors[3] * 2 + tensors[4]
    tensors[3].fill_(5.0)
    graph.replay()
    assert result.eq(14.0).all().item()
    del graph, result, tensors, small
    del pool
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert held() == 0, f"{held()} bytes are still held"
    assert outside.sum().item() == 5_000_000
    gpu_alloc.check()
    return {"segments": segments}


def check_small_things(torch, ours):
    """Empty tensors, views, and many sizes."""
    assert torch.empty(0, device="cuda").sum().item() == 0
    assert torch.cat([torch.empty(0, device="cuda"), torch.ones(3, device="cuda")]).sum() == 3
    pieces = [torch.full((size,), size % 251, device="cuda", dtype=torch.uint8) for size in range(1, 3000, 7)]
    for piece in pieces[::2]:
        view = piece[piece.numel() // 2 :]
        view.record_stream(torch.cuda.Stream())
    total = sum(int((piece != piece.numel() % 251).sum()) for piece in pieces)
    assert total == 0
    if ours:
        assert ours.stats()["allocated_bytes.all.current"] > 0


CHECKS = {
    function.__name__.removeprefix("check_"): function
    for function in [
        check_small_things,
        check_side_streams,
        check_autograd_on_side_streams,
        check_memory_fraction,
        check_graphs,
        check_graph_of_a_training_step,
        check_graphs_that_share_a_pool,
        check_failed_captures,
        check_out_of_memory,
    ]
}


def child(options):
    sys.path.insert(0, HERE)
    ours = None
    if options.allocator == "ours":
        import gpu_alloc as ours

        ours.install(options.library)
    if options.child == "checks":
        import torch

        outcome = {}
        for name, check in CHECKS.items():
            try:
                check(torch, ours)
                torch.cuda.synchronize()
                if ours:
                    ours.check()
                outcome[name] = "ok"
            except Exception as error:
                outcome[name] = f"FAILED: {type(error).__name__}: {error}"
    elif options.child == "two_streams":
        import torch

        outcome = two_streams(torch, ours)
    elif options.child == "mem_pool":
        import torch

        outcome = mem_pool(torch, options.library)
    else:
        outcome = train(options.child, options.steps, ours)
    print("OUTCOME " + json.dumps(outcome), flush=True)
    # Tensors and the allocator end with the process, as in any program.


def run_child(options, part, configuration):
    environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    for variable in ["PYTORCH_CUDA_ALLOC_CONF", "GPU_ALLOC_CONF", "GPU_ALLOC_POLICY"]:
        environment.pop(variable, None)
    environment.update((k, v) for k, v in configuration.items() if k != "allocator")
    command = [sys.executable, os.path.abspath(__file__), "--child", part, "--library", options.library]
    command += ["--allocator", configuration["allocator"], "--steps", str(options.steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("OUTCOME "):
            # A crash while the process ends is a failure too.
            if done.returncode == 0:
                return json.loads(line.removeprefix("OUTCOME ")), None
            return None, f"ended with {done.returncode}\n{done.stderr[-2000:]}"
    return None, f"no result, ended with {done.returncode}\n{done.stderr[-2000:]}"


class Tally:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def tell(self, name, verdict):
        print(f"test {name} ... {verdict}", flush=True)
        self.passed += verdict.startswith("ok")
        self.failed += verdict.startswith("FAILED")
        self.skipped += verdict.startswith("skipped")


def compare_training(options, model, tally, rows):
    baseline = None
    for name, configuration in CONFIGURATIONS.items():
        result, problem = run_child(options, model, configuration)
        test = f"torch::train_{model} ({name})"
        if problem:
            tally.tell(test, "skipped: no torchvision" if "torchvision'" in problem else f"FAILED: {problem}")
            continue
        rows.append((model, name, result))
        if baseline is None:
            baseline = result["losses"]
            tally.tell(test, f"ok (last loss {result['last_loss']:.6f})")
        elif result["losses"] == baseline:
            tally.tell(test, "ok (the same losses)")
        else:
            step = next(i for i, (a, b) in enumerate(zip(result["losses"], baseline)) if a != b)
            tally.tell(test, f"FAILED: the losses differ from step {step} on")


def compare_two_streams(options, tally):
    """What a capture reserves whose blocks two streams use in turn, with each allocator."""
    reuse = {"allocator": "torch", "PYTORCH_CUDA_ALLOC_CONF": "graph_capture_record_stream_reuse:True"}
    for name, configuration in {**CONFIGURATIONS, "torch, reuse in captures": reuse}.items():
        result, problem = run_child(options, "two_streams", configuration)
        test = f"torch::graph_of_two_streams ({name})"
        if problem:
            tally.tell(test, f"FAILED: {problem}")
            continue
        ratio = result["reserved"] / result["live"]
        told = f"{result['reserved'] >> 20} MiB reserved for {result['live'] >> 20} MiB that live"
        # Of the others it is only told; so it is of PyTorch's rules, which are exact.
        bound = configuration["allocator"] == "ours" and "GPU_ALLOC_POLICY" not in configuration
        good = ratio <= 1.1 or not bound
        tally.tell(test, f"ok ({told})" if good else f"FAILED: {told}; changed {result['changed']}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", default=os.path.join(HERE, "liballoc_torch.so"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--require-gpu", action="store_true", help="as the other test programs")
    parser.add_argument("--child")
    parser.add_argument("--allocator", choices=["torch", "ours"])
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    options.library = os.path.abspath(options.library)
    if options.child:
        return child(options)
    try:
        import torch

        present = torch.cuda.is_available()
    except ImportError:
        present = False
    if not present:
        print("skipped: no PyTorch with a GPU here")
        return NO_GPU
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name(0)}", flush=True)
    tally, rows = Tally(), []
    wanted = lambda name: not options.words or any(word in name for word in options.words)
    for model in ["gpt", "resnet"]:
        if wanted(f"torch::train_{model}"):
            compare_training(options, model, tally, rows)
    for name, configuration in CONFIGURATIONS.items():
        if configuration["allocator"] == "torch" or not wanted("torch::checks"):
            continue
        outcome, problem = run_child(options, "checks", configuration)
        if problem:
            tally.tell(f"torch::checks ({name})", f"FAILED: {problem}")
        for check, verdict in (outcome or {}).items():
            tally.tell(f"torch::{check} ({name})", verdict)
    if wanted("torch::graph_of_two_streams"):
        compare_two_streams(options, tally)
    if wanted("torch::mem_pool"):
        result, problem = run_child(options, "mem_pool", CONFIGURATIONS["torch"])
        told = result and f"ok ({result['segments']} bytes in segments of ours)"
        tally.tell("torch::mem_pool", told or f"FAILED: {problem}")
    if rows:
        print(f"\n{'model':<8} {'allocator':<18} {'ms a step':>10} {'peak MiB':>9} {'of it used':>10}")
        for model, name, result in rows:
            reserved, allocated = result["reserved_peak"], result["allocated_peak"]
            print(
                f"{model:<8} {name:<18} {result['step_ms']:>10.2f} {reserved / 2**20:>9.0f}"
                f" {allocated / reserved:>9.1%}"
            )
    print(f"test result: {tally.passed} passed; {tally.failed} failed; {tally.skipped} skipped; on PyTorch")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
