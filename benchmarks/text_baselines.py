"""What the held-out text of a language-model project costs in bits per byte without a network.

    python benchmarks/text_baselines.py path/to/generated/project [--data.path ...]

Counts byte contexts of order 0 to 3 on the training text, mixes each with the orders below it
(Witten-Bell), and scores the test text; compresses the test text with xz -9, alone and after the
training text. Each text is scored with the separator that ends it, as the network is.
"""

import importlib
import lzma
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path


def main(project: str, *flags: str) -> None:
    sys.path.insert(0, project)
    package = next(Path(project).glob("*/train.py")).parent.name
    config = importlib.import_module(f"{package}.runtime.command_line").parse_settings(list(flags))
    data = importlib.import_module(f"{package}.data").load(config)
    train, test = ([bytes(t) + b"\0" for t in s.texts] for s in (data.train, data.test))
    sizes = [(len(s), sum(map(len, s))) for s in (train, data.validation.texts, test)]
    print("files and bytes of train, validation, test:", *sizes)
    for order in range(4):
        print(f"order-{order} byte contexts  {context_model(train, test, order):.3f} bits per byte")
    alone, before = b"".join(test), b"".join(train)
    print(f"xz -9, test text alone  {8 * packed(alone) / len(alone):.3f} bits per byte")
    extra = packed(before + alone) - packed(before)
    print(f"xz -9, after the training text  {8 * extra / len(alone):.3f} bits per byte")


def context_model(train: list[bytes], test: list[bytes], order: int) -> float:
    """Bits per byte of the test texts under counts of the training texts."""
    counts = [defaultdict(Counter) for _ in range(order + 1)]
    for text in train:
        text = b"\0" * order + text
        for k in range(order + 1):
            table = counts[k]
            for i in range(order, len(text)):
                table[text[i - k : i]][text[i]] += 1
    totals = [{c: (sum(n.values()), len(n)) for c, n in table.items()} for table in counts]
    bits, size = 0.0, 0
    for text in test:
        text = b"\0" * order + text
        size += len(text) - order
        for i in range(order, len(text)):
            p = 1 / 256
            for k in range(order + 1):
                context = text[i - k : i]
                if context in counts[k]:
                    total, kinds = totals[k][context]
                    p = (counts[k][context][text[i]] + kinds * p) / (total + kinds)
            bits -= math.log2(p)
    return bits / size


def packed(text: bytes) -> int:
    # xz -9 has a dictionary of 64 MiB: the training text stays in view.
    return len(lzma.compress(text, preset=9))


if __name__ == "__main__":
    main(*sys.argv[1:])
