"""Reads the collectives of a compiled program from its HLO text."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from rljax.planning.collectives import Collective, ring_bytes
from rljax.planning.tables import size

_KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "ragged-all-to-all", "all-to-all",
    "collective-permute",
)  # fmt: skip
_COLLECTIVE = re.compile(rf" = (?P<shape>.*?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLS = re.compile(r"(?:calls|to_apply|(?:true|false)_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+\w*)\[([\d,]*)\]")
_SCOPE = re.compile(r'op_name="[^"]*\b(attention|feed_forward|logprobs|sampling)\b')
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')


@dataclasses.dataclass
class _Computation:
    """One computation of a program.

    Attributes:
      sent: Kind, mesh axis, scope and bytes of each of its collectives.
      calls: The computations it calls once.
      loops: Condition, body and, where the text says it, the trip count of its loops.
      constants: Its integers; that of a loop's condition is the trip count.
    """

    sent: list[tuple[str, str, str, int]] = dataclasses.field(default_factory=list)
    calls: list[str] = dataclasses.field(default_factory=list)
    loops: list[tuple[str, str, int | None]] = dataclasses.field(default_factory=list)
    constants: list[int] = dataclasses.field(default_factory=list)


def read_collectives(text: str, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """The collectives of a partitioned program, by kind and mesh axis; largest first.

    The body of a loop counts once for each iteration, at most where their number depends on data.
    All branches of a conditional count.

    Args:
      text: The optimized HLO of one device's program, as XLA dumps it.
      mesh: Axis -> size, in the order of the device grid.

    Returns:
      Bytes that each device sends with a ring algorithm; `why` says how often, and in which of the
      model's named scopes.
    """
    computations, entry = _parse(text, mesh)
    total: collections.Counter[tuple[str, str]] = collections.Counter()
    times: collections.Counter[tuple[str, str]] = collections.Counter()
    scopes: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )

    def walk(name: str, times_run: int) -> None:
        found = computations.get(name)
        if found is None:
            return
        for kind, axis, scope, sent in found.sent:
            total[kind, axis] += sent * times_run
            times[kind, axis] += times_run
            scopes[kind, axis][scope] += sent * times_run
        for callee in found.calls:
            walk(callee, times_run)
        for condition, body, known in found.loops:
            constants = computations[condition].constants if condition in computations else []
            walk(body, times_run * (known or max(constants, default=1)))

    walk(entry, 1)
    return tuple(
        Collective(
            *key,
            sent,
            f"{times[key]} times: "
            + ", ".join(f"{scope} {size(n)}" for scope, n in scopes[key].most_common()),
        )
        for key, sent in total.most_common()
    )


def _parse(text: str, mesh: Mapping[str, int]) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, name = "", ""
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            name = start["name"]
            computations[name] = _Computation()
            entry = name if start["entry"] else entry
            continue
        if not name or " = " not in line:
            continue
        here = computations[name]
        found = _COLLECTIVE.search(line)
        if found:
            kind, axis, sent = _collective(line, found, name, mesh)
            scope = _SCOPE.search(line)
            if sent:
                here.sent.append((kind, axis, scope[1] if scope else "elsewhere", sent))
        elif " while(" in line:
            condition = re.search(r"condition=%?([\w.\-]+)", line)
            body = re.search(r"body=%?([\w.\-]+)", line)
            known = _TRIPS.search(line)
            if condition and body:
                trips = int(known[1]) if known else None
                here.loops.append((condition[1], body[1], trips))
        elif constant := re.search(r" = s32\[\]\S* constant\((\d+)\)", line):
            here.constants.append(int(constant[1]))
        else:
            names = _CALLS.findall(line)
            for branches in _BRANCHES.findall(line):
                names += re.findall(r"[\w.\-]+", branches)
            here.calls += dict.fromkeys(names)
    return computations, entry


def _collective(
    line: str, found: re.Match[str], computation: str, mesh: Mapping[str, int]
) -> tuple[str, str, int]:
    """Kind, mesh axes and bytes sent of one instruction."""
    kind = found["kind"]
    arrays = [_bytes(*array) for array in _ARRAY.findall(found["shape"])]
    if found["start"] and kind != "all-reduce":
        # (operands, results, counters); the synchronous form has the results only.
        arrays = [n for n in arrays if n > 4]
        arrays = arrays[len(arrays) // 2 :]
    result = sum(arrays)
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
        members = [int(n) for n in re.findall(r"\d+", pairs[1])] if pairs else []
        moved = next(
            ([a, b] for a, b in zip(members[::2], members[1::2], strict=True) if a != b), []
        )
        return kind, _axes(moved, mesh), result if moved else 0
    members = _members(line, math.prod(mesh.values()))
    ways, axis = len(members), _axes(members, mesh)
    if kind == "reduce-scatter":
        return kind, axis, int(ring_bytes(kind, result * ways, ways))
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # as the TPU compiler names it
    return kind, axis, int(ring_bytes(kind, result, ways))


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(map(int, filter(None, dims.split(",")))) * bits // 8


def _members(line: str, devices: int) -> list[int]:
    """The devices of the first group of a collective."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(n) for n in listed[1].split(",")]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        groups, shape, order = ([int(n) for n in x.split(",")] if x else [] for x in iota.groups())
        grid = np.arange(math.prod(shape)).reshape(shape)
        return grid.transpose(order or range(len(shape))).reshape(groups)[0].tolist()
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        names = re.findall(r"'(\w+)'=(\d+)", named[1])
        grid = np.arange(math.prod(int(n) for _, n in names)).reshape([int(n) for _, n in names])
        for dim, (axis, whole) in enumerate(names):
            part = re.search(rf"'{axis}'(?::\((\d+)\)(\d+))?", named[2])
            if part is None:
                grid = grid.take([0], axis=dim)
            elif part[1]:  # a part of the axis: (offset count, size)
                after = int(whole) // int(part[1]) // int(part[2])
                grid = grid.take(range(0, int(part[2]) * after, after), axis=dim)
        return grid.ravel().tolist()
    return list(range(devices))


def _axes(members: list[int], mesh: Mapping[str, int]) -> str:
    """The mesh axes along which the devices of a group differ."""
    if len(members) < 2:
        return "-"
    places = np.asarray(np.unravel_index(members, tuple(mesh.values())))
    differ = (places != places[:, :1]).any(1)
    return "×".join(name for name, d in zip(mesh, differ, strict=True) if d)
