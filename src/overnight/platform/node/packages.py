"""Whether a warm process still imports what a cold start would: installed packages changed, or a script's folder
hides one.

Standard library only: runs in the user's interpreter too.
"""

import contextlib
import os
import sys
from collections.abc import Iterable

_METADATA = (".dist-info", ".egg-info", ".pth", ".egg-link")
_SOURCES = (".py", ".so", ".pyc")

Signature = dict[str, int]


def own_files() -> tuple[str, ...]:
    """Source files of the loaded parts of overnight: an upgrade of ours counts too."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "overnight"]
    return tuple(str(file) for module in modules if (file := getattr(module, "__file__", None)))


def signature(files: Iterable[str]) -> Signature:
    """Modification times (ns) of everything that an install, upgrade or removal of a package touches.

    Args:
        files: Further files; :func:`own_files`, found once: walking ``sys.modules`` touches the memory of every module,
            which a forked process pays for with a page fault each.
    """
    found: Signature = {}
    for folder in dict.fromkeys(path for path in sys.path if path):
        with contextlib.suppress(OSError):
            found[folder] = os.stat(folder).st_mtime_ns  # noqa: PTH116 - at each launch, hundreds of entries
            if os.path.basename(folder) in ("site-packages", "dist-packages"):  # noqa: PTH119
                _add_metadata(folder, found)
    for file in files:
        with contextlib.suppress(OSError):
            found[file] = os.stat(file).st_mtime_ns  # noqa: PTH116
    return found


def _add_metadata(folder: str, found: Signature) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_METADATA):
                with contextlib.suppress(OSError):
                    found[entry.path] = entry.stat().st_mtime_ns


def loaded_names() -> frozenset[str]:
    """Top-level names that are loaded and that a file could have provided."""
    names = {name.partition(".")[0] for name in sys.modules}
    return frozenset(names - set(sys.builtin_module_names) - {"__main__"})


def clash(folder: str, loaded: Iterable[str]) -> str | None:
    """A loaded name that a script in this folder would have got from the folder instead; None if there is none."""
    loaded = frozenset(loaded)
    try:
        with os.scandir(folder or ".") as entries:
            for entry in entries:
                name = entry.name.partition(".")[0]
                if name in loaded and _provides(entry):
                    return name
    except OSError:
        pass  # a missing folder is the script's error, said by the rank
    return None


def _provides(entry: "os.DirEntry[str]") -> bool:
    if entry.name.endswith(_SOURCES):
        return True
    # Without __init__.py a folder is a namespace package, which an installed package beats.
    return entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py"))  # noqa: PTH110, PTH118
