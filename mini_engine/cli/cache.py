"""Lesson 12. The command `cache`: list, verify and clear the records of the disk tier in a directory."""

import argparse
import json
from pathlib import Path

from mini_engine.base.errors import UserError
from mini_engine.tiers.disk import DiskTier
from mini_engine.tiers.seal import seal_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `cache`."""
    parser.add_argument("action", choices=["list", "verify", "clear"], help="what to do with the records")
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory given to --kv-cache-dir")
    parser.add_argument("--remove", action="store_true", help="with verify: remove what cannot be trusted")
    parser.add_argument("--kv-cache-key-file", metavar="FILE", help="with verify: the key that sealed the records")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Carry out the action. Returns 0, or 1 if `verify` found records that cannot be trusted."""
    if not args.directory.is_dir():
        raise UserError(f"there is no directory {args.directory}; name the one given to --kv-cache-dir")
    disk = DiskTier(args.directory, 0, seal_of(args.kv_cache_key_file))
    before, num_bytes, bad, removed = len(disk), disk.num_bytes, [], 0
    if args.action == "verify":
        bad = [{"file": path.name, "reason": reason} for path, reason in disk.verify(args.remove)]
    elif args.action == "clear":
        removed = disk.clear()
    found = {"directory": str(args.directory), "records": before, "bytes": num_bytes, "bad": bad, "removed": removed}
    print(json.dumps(found) if args.json else "\n".join(described(args.action, found)))
    return 1 if bad else 0


def described(action: str, found: dict) -> list[str]:
    """Return the lines that describe the result to the user."""
    lines = [f"{found['directory']}: {found['records']} records, {found['bytes'] / 2**20:.1f} MiB"]
    lines += [f"  {one['file']}: {one['reason']}" for one in found["bad"]]
    if action == "verify" and not found["bad"]:
        lines.append("every record is intact")
    if action == "clear":
        lines.append(f"{found['removed']} records removed")
    return lines
