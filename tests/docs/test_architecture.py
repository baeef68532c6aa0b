"""The picture of the architecture is that of the code as it is."""

from pathlib import Path

from scripts.draw_architecture import LAYERS, TOKEN, draw

ROOT = Path(__file__).resolve().parents[2]


def test_the_picture_is_drawn_from_the_code_as_it_is():
    """Otherwise: python scripts/draw_architecture.py"""
    assert (ROOT / "docs" / "architecture.svg").read_text() == draw()


def test_its_rooms_are_there():
    rooms = {room for _, rooms in LAYERS for room, _ in rooms}
    assert all((ROOT / room).is_dir() for room in rooms) and set(TOKEN) <= rooms
