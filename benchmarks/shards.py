"""Bytes that each device holds under --mesh.fsdp: python benchmarks/shards.py [devices]

Prints a table for both tasks with the default networks. The Python of `make setup` has what it
needs.
"""

import importlib
import os
import sys
import tempfile

from projects import importable


def bytes_per_device(package: str, fsdp: int) -> dict[str, int]:
    """Largest number of bytes on any device, by what they are."""
    import jax

    names = ("config", "data", "mesh", "train_state")
    config, data, mesh, train_state = (importlib.import_module(f"{package}.{x}") for x in names)
    settings = config.Config(ema_decay=0.99, mesh=config.MeshConfig(fsdp=fsdp), total_steps=1000)
    dataset = data.load(settings)
    grid = mesh.create_mesh(settings.mesh, settings.batch_size, 1)
    create, _ = train_state.plan_train_state(settings, dataset, grid)
    state = create()

    def largest(tree):
        held = dict.fromkeys(jax.devices(), 0)
        for array in jax.tree.leaves(tree):
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
        return max(held.values())

    parts = {"parameters": state.params, "moments": state.opt_state, "average": state.ema}
    return {name: largest(tree) for name, tree in parts.items()}


def main(devices: int) -> None:
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    with tempfile.TemporaryDirectory() as out:
        print(f"| | | whole | of {devices} | share |\n|---|---|---|---|---|")
        for task in ("image_classification", "language_model"):
            package = importable(out, task)
            whole, split = bytes_per_device(package, 1), bytes_per_device(package, devices)
            for name in whole:
                share = f"1/{whole[name] / split[name]:.1f}"
                print(f"| {task} | {name} | {whole[name]:,} | {split[name]:,} | {share} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
