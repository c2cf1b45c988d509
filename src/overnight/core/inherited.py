"""What a trial takes along from the shell that submits it, so that whoever prepares for trials can know it before."""

import re
from collections.abc import Mapping

_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|XDG_CACHE_HOME"
    r"|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV"
    r"|CUDA_HOME|CUDA_PATH|HF_HOME|HF_HUB_CACHE|HF_DATASETS_CACHE|HF_HUB_OFFLINE|TRANSFORMERS_CACHE|TORCH_HOME"
    r"|NCCL_\w+|GLOO_\w+"
)


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that every trial takes from the submitting shell; all else, secrets above all, is named in a spec.

    Args:
        env: The shell's variables.
    """
    return {name: value for name, value in env.items() if _INHERITED.fullmatch(name)}
