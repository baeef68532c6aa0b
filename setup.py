"""Maps kernels, loaders and probes of the checkout to packages inside `dsv4`.

Another distribution is called `kernels`: a wheel with a package of that name at its top would overwrite it. The rest of
the project's metadata is in pyproject.toml, whose package-dir table would have to list every package by hand.
"""

from setuptools import find_packages, setup

FOLDERS = {"dsv4": "dsv4", "dsv4.kernels": "kernels", "dsv4.loaders": "loaders", "dsv4.probes": "probes"}

setup(
    package_dir=FOLDERS,
    packages=[
        name + inner for name, folder in FOLDERS.items() for inner in ("", *("." + p for p in find_packages(folder)))
    ],
)
