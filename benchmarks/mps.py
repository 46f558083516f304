"""Parts of one GPU for several processes, by CUDA's multi-process service: started for a benchmark, ended after it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def multi_process_service(wanted: bool = True) -> Iterator[None]:
    """Run the service, where ``wanted``, for the processes that are started inside; they inherit how to reach it."""
    if not wanted:
        yield
        return
    if shutil.which(CONTROL) is None:
        raise SystemExit(f"parts of a GPU need {CONTROL}, which comes with NVIDIA's driver; name whole devices instead")
    with tempfile.TemporaryDirectory(prefix="weft-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        before = {name: os.environ.get(name) for name in places}
        os.environ.update(places)
        with open(os.path.join(folder, "output"), "wb") as output:
            service = subprocess.Popen([CONTROL, "-f"], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                       start_new_session=True)
        try:
            yield
        finally:
            os.killpg(service.pid, signal.SIGKILL)  # its server for the GPU is in the same group
            service.wait()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
