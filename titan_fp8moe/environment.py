"""What this package needs around it, each lack told in one sentence with its remedy.

`check_versions` runs before anything else is imported, so that a wrong version ends in its sentence and not in whatever
fails first because of it.
"""

import atexit
import importlib.metadata
import importlib.util
import re
import sys
import traceback

# Of each package: the oldest version that serves, and the first that does not any more.
VERSIONS = {
    "torch": ("2.10", None),
    "triton": ("3.6", None),
    "torchtitan": ("0.2.1", "0.3"),
}


def _release(version: str) -> tuple[int, ...]:
    """``"2.10.0a0+git1"`` as (2, 10, 0): a build on the way to a release counts as that release."""
    return tuple(map(int, re.match(r"\d+(\.\d+)*", version)[0].split(".")))


def version_problem() -> str | None:
    """The first package that is missing or of a version that does not serve."""
    for package, (oldest, too_new) in VERSIONS.items():
        wanted = f"{package}>={oldest}" + (f",<{too_new}" if too_new else "")
        if importlib.util.find_spec(package) is None:
            return f'titan_fp8moe needs {wanted}, which is not installed: pip install "{wanted}"'
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # a source tree or a build under another name, which does not tell its version
        if _release(found) < _release(oldest) or (too_new and _release(found) >= _release(too_new)):
            return f'titan_fp8moe needs {wanted}, found {found}: pip install "{wanted}"'
    return None


def check_versions() -> None:
    """Raises ImportError for a `version_problem`."""
    if problem := version_problem():
        # The name is for "python -m titan_fp8moe", which then prints the message without a traceback.
        raise ImportError(problem, name=__package__)


def device_problem() -> str | None:
    """Why torchtitan's trainer cannot have a device in this process; None when it can."""
    import torch

    rank = torch.distributed.get_node_local_rank(fallback_rank=0)
    count = torch.cuda.device_count()
    if rank < count:
        return None
    if count:
        return (
            f"LOCAL_RANK is {rank}, but torch sees {count} GPU(s): start at most {count} process(es) on this node "
            "(torchrun --nproc_per_node), or make more visible (CUDA_VISIBLE_DEVICES)"
        )
    return (
        "torch sees no GPU: check the driver, CUDA_VISIBLE_DEVICES and that torch is a CUDA build, or set "
        'experimental.custom_import = "titan_fp8moe.cpu" to train on the CPU'
    )


def _explain_missing_device() -> None:
    failed_in = traceback.extract_tb(getattr(sys, "last_traceback", None))
    if failed_in and failed_in[-1].filename == sys.modules["torch.cuda"].__file__ and (problem := device_problem()):
        print(f"titan_fp8moe: {problem}", file=sys.stderr)


def explain_missing_device_at_exit() -> None:
    """Let a process that torch has no GPU for end in `device_problem`, below torch's traceback.

    torchtitan's trainer takes its device before it calls anything of this package. To warn at import would be wrong
    for a run whose config chooses the CPU afterwards, and for every other use of the package.
    """
    # Reloading the module must not make it two sentences.
    atexit.unregister(_explain_missing_device)
    atexit.register(_explain_missing_device)
