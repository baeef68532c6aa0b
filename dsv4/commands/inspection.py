"""The content of a checkpoint, and the destination of each of its tensors, without running the model."""

import zlib
from pathlib import Path

from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import Progress, read_json
from dsv4.loaders.load import Inventory
from dsv4.model import families
from dsv4.model.families import plan_model
from dsv4.model.numerics import NUMERICS


def inspect(path: str | Path, verify: bool = False, progress: Progress | None = None) -> dict:
    """The load ledger and the config ledger of a checkpoint as JSON values.

    verify: read every tensor too; NaN and negative table entries become problems, and each tensor gets the crc32 of
    its bytes. Raises CheckpointError or ConfigError when the files or the config cannot be read at all.
    """
    inventory = Inventory.open(path)
    model = plan_model(inventory, NUMERICS["native"], "reference", None)
    ledger = model.ledger.to_json()
    if verify:
        _verify(inventory, ledger, progress)
    formats: dict[str, int] = {}
    for form in inventory.formats.values():
        formats[form.value] = formats.get(form.value, 0) + 1
    return {
        "checkpoint": str(path),
        "layout": inventory.layout.name,
        "shards": [f.name for f in inventory.files.shards],
        "formats": formats,
        "mtp_blocks": inventory.mtp_blocks,
        "ledger": ledger,
        "config": config_ledger(inventory, model.config),
    }


def config_ledger(inventory: Inventory, config) -> list[dict]:
    """One row for each key of config.json and each derived value: requested, effective, and what happened to it."""
    raw = read_json(inventory.path / "config.json")
    effective = {k: getattr(config, k) for k in config.__dataclass_fields__ if k != "never_read"}
    rows = []
    for key in sorted(set(raw) | set(inventory.config_notes)):
        note = inventory.config_notes.get(key)
        read = key in inventory.config and key not in config.never_read
        value = effective.get(key, inventory.config.get(key)) if read else None
        status = (
            "derived"
            if note and key not in raw
            else "read"
            if read
            else "translated"
            if key not in inventory.config
            else "never read"
        )
        rows.append({"key": key, "requested": raw.get(key), "effective": value, "status": status, "note": note or ""})
    return rows


def _verify(inventory: Inventory, ledger: dict, progress: Progress | None) -> None:
    rows = {row["tensor"]: row for row in ledger["tensors"]}
    total, done = sum(t.nbytes for t in inventory.files.tensors.values()), 0
    for key, tensor in inventory.files.tensors.items():
        rows[key]["crc32"] = f"{zlib.crc32(memoryview(inventory.files.read(tensor).numpy())):08x}"
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    for name in inventory.sources:
        try:
            inventory.read(name)
        except CheckpointError as error:
            ledger["problems"].append(str(error))
    try:
        families.of(inventory).check_copies(inventory)
    except CheckpointError as error:
        ledger["problems"].append(str(error))
