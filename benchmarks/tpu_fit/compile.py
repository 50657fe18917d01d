"""Compile a traced training step for a TPU that is not there: the second process of `benchmarks.tpu_fit`.

`python -m benchmarks.tpu_fit.compile PROGRAM TOPOLOGY RESULT`, in the environment with jax and libtpu (`make
tpu-fit-env`). In: StableHLO bytes PROGRAM, and beside them PROGRAM.json with `aliases`, the pairs (argument,
output) that share one buffer in training. Out: RESULT, JSON with the memory of one device, XLA's operation
and byte counts, the collectives and the compiler's version; or `out_of_hbm`, with what the program wanted.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.tpu_fit.topologies import TOPOLOGIES, Topology
from utils.help_pages import PeopleParser

TESTED = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.51"}
RESULT_VERSION = 2  # of what RESULT holds; a new one makes kept results void
GIB = 2.0**30
UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": GIB, "T": 2.0**40}
BITS = {"pred": 8, "bf16": 16, **{f"{kind}{n}": n for kind in "fsu" for n in (8, 16, 32, 64)}}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(COLLECTIVES)})(-start)?\(")
PACKED = re.compile(r'dense<"0x([0-9A-F]+)"> : tensor<([\dx]+)xi1>')
SIZE = r"([\d.]+)([KMGT]?)"
OUT_OF_HBM = (
    re.compile(rf"\({SIZE}\) exceeds available HBM \({SIZE}\)"),
    re.compile(rf"Used {SIZE} of {SIZE} hbm"),
)


def shape_bytes(text: str) -> int:
    """Bytes of all arrays that an HLO type names, a tuple's together."""
    total = 0
    for kind, sizes in SHAPE.findall(text):
        elements = 1
        for size in filter(None, sizes.split(",")):
            elements *= int(size)
        total += elements * BITS[kind] // 8
    return total


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """{operation: {count, bytes}} of an optimised HLO module; bytes of the results on one device.

    An asynchronous operation is counted at its start, whose type also repeats the operands: only the results
    of an all-gather or a permutation are counted. No training step here has a loop around a collective.
    """
    counts: dict[str, dict[str, int]] = {}
    for kind, name, is_start in COLLECTIVE.findall(hlo):
        moved = shape_bytes(kind)
        if is_start and name != "all-reduce":
            moved = shape_bytes(_results_of_start(kind))
        entry = counts.setdefault(name, {"count": 0, "bytes": 0})
        entry["count"] += 1
        entry["bytes"] += moved
    return counts


def _results_of_start(kind: str) -> str:
    """The second member of the type ((operands), (results), ...) or (operand, result, ...)."""
    members, depth, start = [], 0, 1
    for place, letter in enumerate(kind):
        depth += letter in "([{"
        depth -= letter in ")]}"
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            members.append(kind[start:place])
            start = place + 1
    return members[1]


def unpack_booleans(program: str) -> str:
    """StableHLO text whose large boolean constants have a byte an element, as the compiler's parser reads
    them; torch_xla 2.9 writes eight in a byte.
    """

    def unpack(match: re.Match[str]) -> str:
        data, shape = match.groups()
        count = math.prod(int(size) for size in shape.split("x") if size)
        packed = bytes.fromhex(data)
        if len(packed) == count or count < 2:
            return match[0]
        bits = "".join(f"{packed[i // 8] >> i % 8 & 1:02X}" for i in range(count))
        return f'dense<"0x{bits}"> : tensor<{shape}xi1>'

    return PACKED.sub(unpack, program)


def wanted_bytes(message: str) -> tuple[float, float] | None:
    """(wanted, available) bytes of HBM in a compiler's out-of-memory message; None in any other message."""
    for pattern in OUT_OF_HBM:
        if match := pattern.search(message):
            wanted, unit, available, available_unit = match.groups()
            return float(wanted) * UNITS[unit], float(available) * UNITS[available_unit]
    return None


def compile_program(program: bytes, aliases: list[tuple[int, int]], topology: Topology) -> dict[str, Any]:
    """Compile for one slice. Private names of JAX are used here and nowhere else."""
    # no TPU is opened here, so its lock against a second process means nothing
    os.environ.update(TPU_SKIP_MDS_QUERY="1", JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    versions = {name: version(name) for name in TESTED}
    try:
        import jax
        import numpy as np
        from jax._src.interpreters.mlir import make_ir_context
        from jax._src.lib import xla_client
        from jax._src.lib.mlir import ir
        from jax.experimental import topologies

        config = {"chip_config_name": topology.chip_config} if topology.chip_config else {}
        described = topologies.get_topology_desc(topology_name=topology.libtpu_name, platform="tpu", **config)
        devices = described.devices
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = 1, len(devices)
        options.device_assignment = xla_client.DeviceAssignment.create(np.arange(len(devices))[None])
        build = options.executable_build_options
        build.num_replicas, build.num_partitions = 1, len(devices)
        build.use_spmd_partitioning, build.use_shardy_partitioner = True, False
        with make_ir_context():
            module = ir.Module.parse(unpack_booleans(program.decode()))
            if "sym_name" not in module.operation.attributes:
                module.operation.attributes["sym_name"] = ir.StringAttr.get("train_step")
            _share_buffers(module, aliases, ir)
            device_list = xla_client.DeviceList(tuple(devices))
            client = devices[0].client
            compile_it = client.compile
    except (ImportError, AttributeError, TypeError) as error:
        raise SystemExit(
            f"benchmarks.tpu_fit.compile: works with {TESTED}, found {versions}: {error}"
        ) from error
    try:
        compiled = compile_it(module, executable_devices=device_list, compile_options=options)
    except jax.errors.JaxRuntimeError as error:
        memory = wanted_bytes(str(error))
        if memory is None:
            raise
        wanted, available = memory
        return {
            "libtpu": versions["libtpu"],
            "out_of_hbm": {"wanted_bytes": wanted, "available_bytes": available},
        }
    stats = compiled.get_compiled_memory_stats()
    cost = compiled.cost_analysis()
    return {
        "libtpu": versions["libtpu"],
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
        "flops": cost["flops"],
        "bytes_accessed": cost["bytes accessed"],
        "collectives": collectives(compiled.hlo_modules()[0].to_string()),
    }


def _share_buffers(module: Any, aliases: list[tuple[int, int]], ir: Any) -> None:
    """Mark arguments whose buffers hold an output afterwards, as training updates in place. What no sharding
    is written on lies on every device, before and after.
    """
    entry = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    of_arguments = _attributes(entry, "arg_attrs", len(entry.type.inputs), ir)
    of_results = _attributes(entry, "res_attrs", len(entry.type.results), ir)
    for held in (*of_arguments, *of_results):
        held.setdefault("mhlo.sharding", ir.StringAttr.get("{replicated}"))
    number = ir.IntegerType.get_signless(32)
    for argument, output in aliases:
        of_arguments[argument]["tf.aliasing_output"] = ir.IntegerAttr.get(number, output)
        of_results[output]["mhlo.sharding"] = of_arguments[argument]["mhlo.sharding"]
    for name, attributes in (("arg_attrs", of_arguments), ("res_attrs", of_results)):
        entry.attributes[name] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in attributes])


def _attributes(entry: Any, name: str, count: int, ir: Any) -> list[dict[str, Any]]:
    if name not in entry.attributes:
        return [{} for _ in range(count)]
    return [{a.name: a.attr for a in ir.DictAttr(d)} for d in ir.ArrayAttr(entry.attributes[name])]


def main(argv: list[str] | None = None) -> int:
    """Compile what benchmarks.tpu_fit recorded."""
    parser = PeopleParser("benchmarks.tpu_fit.compile", __doc__ or "")
    parser.add_argument("program", type=Path, metavar="PROGRAM", help="what benchmarks.tpu_fit.trace wrote")
    parser.add_argument("topology", choices=sorted(TOPOLOGIES), metavar="TOPOLOGY", help="as v4-32")
    parser.add_argument("result", type=Path, metavar="RESULT", help="a JSON file to write")
    args = parser.parse_args(argv)
    program, topology, result = args.program, TOPOLOGIES[args.topology], args.result
    traced = json.loads(program.with_name(f"{program.name}.json").read_text())
    aliases = [(int(a), int(o)) for a, o in traced["aliases"]]
    result.write_text(json.dumps(compile_program(program.read_bytes(), aliases, topology)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
