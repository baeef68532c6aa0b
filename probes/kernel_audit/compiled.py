"""Solutions in C++ and CUDA, built by torch.utils.cpp_extension."""

from pathlib import Path
from shutil import which

from dsv4.probes.kernel_audit.errors import KernelAuditError

SUFFIXES = (".cpp", ".cc", ".cxx", ".cu")


def built(document: dict, dialect: str, folder: Path, name: str, path):
    """The sources in `folder` as an extension module. Raises KernelAuditError: the binding must be torch's, and the
    compilers must be there."""
    spec = document["spec"]
    binding = spec.get("binding") or ("torch" if dialect == "sol" else "tvm-ffi")
    if binding != "torch":
        raise KernelAuditError(
            f"Solution {path} is bound by {binding}, which is not supported; expected spec.binding torch, with a "
            "PYBIND11_MODULE in the sources"
        )
    sources = [folder / s["path"] for s in document["sources"] if Path(s["path"]).suffix in SUFFIXES]
    cuda = any(source.suffix == ".cu" for source in sources)
    for tool, wanted in (("ninja", True), ("c++", True), ("nvcc", cuda)):
        if wanted and not _there(tool):
            raise KernelAuditError(f"Solution {path} must be compiled, and {tool} is not there; install it")
    from torch.utils.cpp_extension import load

    options = spec.get("compile_options") or {}
    try:
        return load(
            name,
            [str(source) for source in sources],
            extra_cflags=options.get("cflags"),
            extra_cuda_cflags=options.get("cuda_cflags", ["-O3", "--use_fast_math"] if dialect == "sol" else None),
            extra_ldflags=options.get("ld_flags", ["-lcuda"] if dialect == "sol" and cuda else None),
            extra_include_paths=[str(folder)],
            build_directory=str(folder),
        )
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "error" in line] or str(error).splitlines() or [""]
        raise KernelAuditError(f"Solution {path} does not compile: {lines[0][:300]}") from error


def _there(tool: str) -> bool:
    if tool == "nvcc":
        from torch.utils.cpp_extension import CUDA_HOME

        return which("nvcc") is not None or CUDA_HOME is not None
    return which(tool) is not None
