"""Course machinery. Invariants of every frame of a lab, and the task responsible for each.

A reader's own code can break a rule. The lab ends at the event that did it and links to the task.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Frames = Sequence[dict[str, Any]]
Broken = tuple[int, str]  # the task, and the problem


def one_place_each(held: list[int], free: list[int], every: range, task: int) -> Iterator[Broken]:
    """Check that each block of `every` is free or has one holder. task: the one to blame."""
    for block, times in Counter(held).items():
        if times > 1:
            yield task, f"Block {block} has {times} holders."
        if block in free:
            yield task, f"Block {block} is held, and it is on the free list."
    for block, times in Counter(free).items():
        if times > 1:
            yield task, f"Block {block} is on the free list {times} times."
    for block in every:
        if block not in held and block not in free:
            yield task, f"Block {block} is lost: no request holds it, and it is not on the free list."


def pool_rules(frames: Frames, settings: dict[str, Any], kind: str) -> Iterator[Broken]:
    """Yield lesson 2's violations: task 2 takes blocks, task 3 frees them, task 4 reserves slots."""
    frame, size = frames[-1], settings["size"]
    for each in frame["requests"]:
        if each["slots"] != len(each["blocks"]) * size:
            yield 4, f"{each['name']} has {each['slots']} slots in {len(each['blocks'])} blocks of {size}."
        if each["slots"] - each["written"] >= size:
            yield 4, f"{each['name']} holds a block that it does not need."
    held = [block for each in frame["requests"] for block in each["blocks"]]
    yield from one_place_each(held, frame["free"], range(settings["blocks"]), 3 if kind == "-" else 2)


def table_rules(frames: Frames, settings: dict[str, Any], kind: str) -> Iterator[Broken]:
    """Yield lesson 3's violations: task 1 grows a table, task 2 finds a token, task 3 shrinks a table."""
    frame, size = frames[-1], settings["size"]
    task = 3 if kind in "!-" else 1
    for table in frame["tables"]:
        name, needed = table["name"], -(-table["tokens"] // size)
        if len(table["blocks"]) != needed:
            yield task, f"{name} has {len(table['blocks'])} blocks for {table['tokens']} tokens; it needs {needed}."
            continue
        for position in range(table["tokens"]):
            slot = table["blocks"][position // size] * size + position % size
            if frame["slots"][slot] != f"{name}{position}":
                yield 2, f"Token {position} of {name} belongs into slot {slot}, which holds {frame['slots'][slot]}."
    held = [block for table in frame["tables"] for block in table["blocks"]]
    yield from one_place_each(held, frame["free"], range(1, settings["blocks"]), task)


def batch_rules(frames: Frames, settings: dict[str, Any], kind: str) -> Iterator[Broken]:
    """Yield lesson 5's violations: task 1 makes room, 2 keeps the budget, 3 preempts, 4 admits, 5 records."""
    cells, held = frames[-1]["cells"], frames[-1]["held"]
    chunks = {name: cell for name, cell in cells.items() if "stop" in cell}
    tokens = sum(cell["stop"] - cell["start"] for cell in chunks.values())
    if tokens > settings["budget"]:
        yield 2, f"The step computes {tokens} tokens; its budget is {settings['budget']}."
    for name, cell in cells.items():
        if cell["kind"] in ("out", "waits") and held.get(name):
            yield 3, f"{name} does not run and holds {held[name]} blocks."
    if len(chunks) > settings["seats"]:
        yield 4, f"{len(chunks)} requests run; the limit is {settings['seats']}."
    for name, cell in chunks.items():
        if held.get(name, 0) * settings["size"] < cell["stop"]:
            yield 1, f"{name} computes {cell['stop']} tokens with {held.get(name, 0)} blocks of {settings['size']}."
        if cell["start"] != (done := computed(frames[:-1], name)):
            yield 5, f"{name} computes from token {cell['start']} on; {done} of its tokens were computed."


def computed(frames: Frames, name: str) -> int:
    """Return the number of a request's tokens that the frames have computed since it arrived or was preempted."""
    done = 0
    for frame in frames:
        cell = frame["cells"].get(name, {"kind": "not in this step"})
        if cell["kind"] in ("out", "aborted", "waits"):
            done = 0
        done = 0 if name in frame["ended"] else cell.get("stop", done)
    return done


def tree_rules(frames: Frames, settings: dict[str, Any], kind: str) -> Iterator[Broken]:
    """Yield lesson 8's violations: task 1 counts holders, 3 locks, 5 stores, 6 evicts."""
    frame = frames[-1]
    stored = Counter(block for node in frame["nodes"] for block in node["blocks"])
    tables = Counter(block for table in frame["tables"] for block in table["blocks"])
    for block, times in stored.items():
        if times > 1:
            yield 5, f"Block {block} is in the tree {times} times."
    for block in frame["evicted"]:
        if tables[block]:
            yield 6, f"Block {block} was evicted, and a running request reads it."
    for node in frame["nodes"]:
        if not node["locks"] and tables[node["blocks"][-1]]:
            yield 3, f"Block {node['blocks'][-1]} is in use, and its node is not locked."
        if node["locks"] < 0:
            yield 3, f"The node that ends with block {node['blocks'][-1]} has {node['locks']} locks."
    for block, count in enumerate(frame["counts"]):
        if block and count != stored[block] + tables[block]:
            yield 1, f"Block {block} has {stored[block] + tables[block]} holders and a count of {count}."


def no_rules(frames: Frames, settings: dict[str, Any], kind: str) -> Iterator[Broken]:
    """Yield nothing: lesson 20's lab runs no code of a reader's own."""
    yield from ()


# By the lab's name. Arguments: the frames up to now, the settings, the event's kind
RULES = {"pool": pool_rules, "table": table_rules, "batch": batch_rules, "tree": tree_rules, "evictor": no_rules}
