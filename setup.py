"""Maps kernels, loaders and probes of the checkout to packages inside `dsv4`, and the demo checkpoint to its data.

Another distribution is called `kernels`: a wheel with a package of that name at its top would overwrite it. The demo
checkpoint (20 MB) comes along, so that `dsv4 demo`, and every command that takes a checkpoint, runs after `pip install`
without a checkout and without a network. The rest of the project's metadata is in pyproject.toml, whose package-dir
table would have to list every package by hand.
"""

from setuptools import find_packages, setup

FOLDERS = {"dsv4": "dsv4", "dsv4.kernels": "kernels", "dsv4.loaders": "loaders", "dsv4.probes": "probes"}
DEMO = {"dsv4.demo_checkpoint": "demo"}  # data alone: a folder without Python files

setup(
    package_dir=FOLDERS | DEMO,
    packages=[
        name + inner for name, folder in FOLDERS.items() for inner in ("", *("." + p for p in find_packages(folder)))
    ]
    + list(DEMO),
)
